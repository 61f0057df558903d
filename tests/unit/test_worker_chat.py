"""Chat templates and the translation of chat requests."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import CHATML

from loraproxy.errors import InvalidRequest, NotSupported
from loraproxy.worker.chat import ChatPrompt, chat_to_completion
from loraproxy.worker.templates import ChatTemplate

USER = {"role": "user", "content": "hi"}
TYPED = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
EITHER = (
    "{% for m in messages %}{% if m.content is string %}S:{{ m.content }}"
    "{% else %}{% for p in m.content %}P:{{ p.text }}{% endfor %}{% endif %};{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}"
)


def template(source: str | None = CHATML) -> ChatTemplate:
    return ChatTemplate(source, "<s>", "</s>")


def chat(source: str | None = CHATML, **fields: Any) -> ChatPrompt:
    return chat_to_completion({"messages": [USER], **fields}, template(source))


def test_a_chat_is_rendered_with_an_opening_for_the_answer() -> None:
    prompt = chat()
    assert prompt.body["prompt"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_model_without_a_template_gets_chatml() -> None:
    assert chat(None).body["prompt"] == chat().body["prompt"]


def test_add_generation_prompt_can_be_turned_off() -> None:
    assert chat(add_generation_prompt=False).body["prompt"] == "<|im_start|>user\nhi<|im_end|>\n"


def test_a_last_message_of_the_assistant_is_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "Sure, "}]
    prompt = chat(messages=messages)
    assert prompt.body["prompt"].endswith("<|im_start|>assistant\nSure, ")
    assert (prompt.prefill, prompt.streamed_prefill) == ("Sure, ", "Sure, ")
    asked = chat(messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert asked.body["prompt"] == prompt.body["prompt"]
    assert (asked.prefill, asked.streamed_prefill) == ("Sure, ", "")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": None}, "'messages' is required"),
        ({"messages": "hi"}, "Expected 'messages' to be an array"),
        ({"messages": [5]}, "objects with 'role' and 'content'"),
        ({"messages": [{"content": "x"}]}, "every message needs a 'role'"),
        ({"messages": [{"role": "user"}]}, "All non-assistant messages must contain 'content'"),
        ({"messages": [{"role": "assistant"}]}, "either 'content' or 'tool_calls'"),
        ({"messages": [{"role": "user", "content": 5}]}, "Expected 'content' to be a string or an array"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "unsupported content[].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[].text must be a string"),
        ({"messages": [USER, *[{"role": "assistant", "content": "x"}] * 2]}, "Cannot have 2 or more assistant"),
        ({"continue_final_message": True}, "Cannot set both"),
        ({"messages": [], "continue_final_message": True, "add_generation_prompt": False}, "needs a message"),
        ({"json_schema": {}, "grammar": "x"}, "Cannot use both json_schema and grammar"),
        ({"response_format": {"type": "xml"}}, "but got: xml"),
        ({"response_format": "json"}, "Field 'response_format'"),
        ({"top_logprobs": 3}, "top_logprobs requires logprobs"),
        ({"chat_template_kwargs": 5}, "Field 'chat_template_kwargs'"),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "enable_thinking"),
        ({"tools": {}}, "Field 'tools'"),
    ],
)
def test_a_wrong_chat_is_refused_with_the_reason(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert message in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"functions": [{"name": "f"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
    ],
)
def test_tools_and_media_are_not_supported(fields: dict[str, Any]) -> None:
    with pytest.raises(NotSupported):
        chat(**fields)


def test_tools_that_may_not_be_called_are_ignored() -> None:
    assert chat(tools=[], tool_choice="auto").body["prompt"] == chat().body["prompt"]
    assert chat(tools=[{"type": "function"}], tool_choice="none").body["prompt"] == chat().body["prompt"]


def test_content_takes_the_form_that_the_template_takes() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    typed_message = {"role": "user", "content": parts}
    assert "user\na\nb<|im_end|>" in chat(messages=[typed_message]).body["prompt"]
    assert chat(TYPED).body["prompt"] == "user:hi;assistant:"
    assert chat(TYPED, messages=[typed_message]).body["prompt"] == "user:ab;assistant:"
    assert chat(EITHER, messages=[typed_message, USER]).body["prompt"] == "P:aP:b;S:hi;"


def test_a_system_message_moves_into_the_next_where_the_template_has_no_such_role() -> None:
    messages = [{"role": "system", "content": "be brief"}, USER]
    assert chat(NO_SYSTEM, messages=messages).body["prompt"] == "user:be brief\nhi;"
    assert "system\nbe brief" in chat(messages=messages).body["prompt"]


def test_the_developer_is_the_system() -> None:
    assert "system\nx" in chat(messages=[{"role": "developer", "content": "x"}, USER]).body["prompt"]


def test_the_bos_that_the_tokenizer_adds_is_cut_off() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}"
    message = [{"role": "user", "content": "x"}]
    with_bos = ChatTemplate(source, "<s>", "</s>", add_bos=False)
    without = ChatTemplate(source, "<s>", "</s>", add_bos=True)
    assert with_bos.render(message, {}, add_generation_prompt=True) == "<s>x"
    assert without.render(message, {}, add_generation_prompt=True) == "x"


def test_template_variables_reach_the_template() -> None:
    source = "{{ style }}/{{ enable_thinking }}/{{ reasoning_effort }}"
    prompt = chat(source, chat_template_kwargs={"style": "old"}, reasoning_effort="low")
    assert prompt.body["prompt"] == "old/True/low"
    assert chat(source, reasoning_effort="none").body["prompt"] == "/False/"


def test_a_templates_own_refusal_is_the_error() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        chat("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize("source", ["{{ messages[0].nothing.more }}", "{{ 1 / 0 }}", "{{ ''.__class__.__mro__ }}"])
def test_a_template_that_fails_or_leaves_its_sandbox_is_a_clear_error(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        chat(source)


def test_a_template_that_is_no_jinja_is_refused_when_it_is_compiled() -> None:
    with pytest.raises(InvalidRequest, match="not valid Jinja"):
        template("{% for %}")


def test_generation_tags_loop_controls_and_tojson_work() -> None:
    source = "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% break %}{% endfor %}"
    assert chat(source, messages=[USER, USER]).body["prompt"] == '{"role": "user", "content": "hi"}'


def test_response_formats_become_schemas() -> None:
    schema = {"type": "boolean"}
    assert chat(response_format={"type": "json_object"}).body["json_schema"] == {}
    assert chat(response_format={"type": "json_object", "schema": schema}).body["json_schema"] == schema
    wrapped = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert chat(response_format=wrapped).body["json_schema"] == schema
    assert chat(response_format={"type": "text"}).body["json_schema"] is None


def test_logprobs_of_a_chat_are_n_probs() -> None:
    assert chat(logprobs=True).body["n_probs"] == 20
    assert chat(logprobs=True, top_logprobs=2).body["n_probs"] == 2
    assert "n_probs" not in chat(logprobs=False).body
