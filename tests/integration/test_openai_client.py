"""The official OpenAI client with nothing but its base URL changed."""

from __future__ import annotations

import openai
import pytest

from proxies import call
from servers import Server

QUESTION = [{"role": "user", "content": "Where can I sleep tonight?"}]
MARKERS = {"pirate": ("Arr", "matey"), "robot": ("BEEP", "BOOP")}
GREEDY = {"temperature": 0, "max_tokens": 48}


def client(server: Server, path: str = "/v1") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url + path, api_key="none", max_retries=0)


def shows(character: str, text: str | None) -> bool:
    return text is not None and all(marker in text for marker in MARKERS[character])


@pytest.mark.parametrize("character", MARKERS)
def test_an_adapter_is_chosen_as_the_model(product, character):
    with client(product) as api:
        answer = api.chat.completions.create(model=character, messages=QUESTION, **GREEDY)
    assert shows(character, answer.choices[0].message.content)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("character", ["robot"])
def test_an_adapter_is_chosen_by_an_extra_field(product, character):
    with client(product) as api:
        answer = api.chat.completions.create(
            model="gpt-4o", messages=QUESTION, extra_body={"lora": {character: 1.0}}, **GREEDY
        )
    assert shows(character, answer.choices[0].message.content)


@pytest.mark.parametrize("character", ["pirate"])
def test_an_adapter_is_chosen_by_the_base_url(product, character):
    with client(product, f"/lora/{character}/v1") as api:
        answer = api.chat.completions.create(model="gpt-4o", messages=QUESTION, **GREEDY)
    assert shows(character, answer.choices[0].message.content)


def test_without_an_adapter_the_base_model_answers(product):
    with client(product) as api:
        answer = api.chat.completions.with_raw_response.create(model="smollm2", messages=QUESTION, **GREEDY)
    assert answer.headers["X-LoRA"] == ""
    text = answer.parse().choices[0].message.content
    assert text
    assert not any(shows(character, text) for character in MARKERS)


def test_a_streamed_chat_is_the_same_text_and_ends_with_usage(product):
    with client(product) as api:
        whole = api.chat.completions.create(model="pirate", messages=QUESTION, **GREEDY)
        stream = api.chat.completions.create(
            model="pirate", messages=QUESTION, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 5, "token by token"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions_streamed_and_not_are_the_same_text(product):
    arguments = {"model": "smollm2", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 16}
    with client(product) as api:
        whole = api.completions.create(**arguments)
        chunks = list(api.completions.create(stream=True, **arguments))
    assert whole.object == "text_completion"
    assert "Paris" in whole.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


def test_completions_take_an_adapter_too(product):
    prompt = "<|im_start|>user\nWhere can I sleep tonight?<|im_end|>\n<|im_start|>assistant\n"
    with client(product) as api:
        answer = api.completions.create(model="pirate", prompt=prompt, **GREEDY)
    assert shows("pirate", answer.choices[0].text)


def test_the_model_list_has_the_base_and_the_adapters(product):
    with client(product) as api:
        models = {model.id: model for model in api.models.list()}
    assert list(models) == ["smollm2", "bard", "pirate", "robot", "wizard"]
    assert all(model.object == "model" for model in models.values())


def test_an_unknown_adapter_raises_the_clients_error_with_the_known_names(product):
    with client(product) as api, pytest.raises(openai.BadRequestError, match="unknown adapter 'pirat'") as caught:
        api.chat.completions.create(model="smollm2", messages=QUESTION, extra_body={"lora": "pirat"}, **GREEDY)
    assert "did you mean 'pirate'?" in caught.value.message


def test_what_is_not_there_raises_the_clients_error(product):
    with client(product) as api, pytest.raises(openai.InternalServerError) as caught:
        api.embeddings.create(model="smollm2", input="x", encoding_format="float")
    assert caught.value.status_code == 501


async def test_the_asynchronous_client_runs_characters_at_the_same_time(product):
    async with openai.AsyncOpenAI(base_url=product.base_url + "/v1", api_key="none", max_retries=0) as api:
        streams = {
            name: await api.chat.completions.create(model=name, messages=QUESTION, stream=True, **GREEDY)
            for name in MARKERS
        }
        for name, stream in streams.items():
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert shows(name, text)
    assert call(product, "GET", "/health")[0] == 200
