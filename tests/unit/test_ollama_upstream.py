"""llama-server's and OpenAI's API over Ollama's: requests one way, answers and streams the other."""

import asyncio
import json

import pytest
from ollama_bench import client_of

from loraproxy.backends.ollama_answers import ChatAnswer, CompletionAnswer, NativeAnswer, collected
from loraproxy.backends.ollama_requests import chat_request, completion_request, options
from loraproxy.errors import InvalidRequest, NotSupported

DEFAULTS = {
    "num_predict": -1,
    "stop": [],
    "top_k": 40,
    "repeat_last_n": 64,
    "seed": -1,
    "num_keep": 0,
    "temperature": 0.8,
    "top_p": 0.95,
    "min_p": 0.05,
    "typical_p": 1.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
LAST = {
    "model": "loraproxy-x",
    "done": True,
    "done_reason": "length",
    "prompt_eval_count": 5,
    "prompt_eval_duration": 10_000_000,
    "eval_count": 2,
    "eval_duration": 40_000_000,
}


def test_a_completion_is_a_raw_generation_with_llama_servers_defaults():
    assert completion_request({"prompt": "Ahoy", "lora": [], "model": "any", "cache_prompt": True}, "m") == {
        "model": "m",
        "prompt": "Ahoy",
        "raw": True,
        "options": DEFAULTS,
    }


async def test_no_request_meets_a_connection_that_the_server_has_just_closed():
    serving = []

    async def serve_once(reader, writer):
        serving.append(asyncio.current_task())
        await reader.readuntil(b"}")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        await reader.read(1)  # the beginning of a second request, or the end
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve_once, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, client_of(f"http://{host}:{port}") as client:
        for _ in range(3):
            assert await client.show("m") == {}
    await asyncio.gather(*serving)


def test_sampling_fields_become_options():
    body = {
        "n_predict": 9,
        "temperature": 0,
        "top_k": 1,
        "seed": 7,
        "stop": "\n",
        "repeat_penalty": 1.2,
        "repeat_last_n": -1,
        "n_keep": 2,
        "num_ctx": 512,
        "max_tokens": None,
    }
    changed = {"num_predict": 9, "temperature": 0.0, "top_k": 1, "seed": 7, "stop": ["\n"]}
    more = {"repeat_penalty": 1.2, "repeat_last_n": -1, "num_keep": 2, "num_ctx": 512}
    assert options(body) == {**DEFAULTS, **changed, **more}


@pytest.mark.parametrize("field", ["n_predict", "max_tokens", "max_completion_tokens"])
def test_every_name_of_the_limit_counts(field):
    assert options({field: 3})["num_predict"] == 3
    with pytest.raises(NotSupported, match=f"'{field}' must not be 0"):
        options({field: 0})


@pytest.mark.parametrize("seed", [-1, -7, 2**32 - 1])
def test_every_random_seed_is_minus_one(seed):
    assert options({"seed": seed})["seed"] == -1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mirostat", 2),
        ("dry_multiplier", 0.8),
        ("xtc_probability", 0.5),
        ("dynatemp_range", 0.1),
        ("top_n_sigma", 1.0),
        ("logit_bias", [[1, 2.0]]),
        ("ignore_eos", True),
        ("grammar", "root ::= x"),
        ("n_probs", 3),
        ("logprobs", True),
        ("n", 2),
        ("n_cmpl", 2),
        ("samplers", ["top_k"]),
        ("response_fields", ["content"]),
        ("return_tokens", True),
        ("timings_per_token", True),
        ("suffix", "x"),
        ("echo", True),
        ("t_max_predict_ms", 5),
    ],
)
def test_what_ollama_cannot_do_is_501_with_the_fields_name(field, value):
    with pytest.raises(NotSupported, match=f"Field '{field}' is not supported by the Ollama backend"):
        completion_request({"prompt": "a", field: value}, "m")


def test_values_that_ask_for_nothing_are_no_reason_to_refuse():
    neutral = {"mirostat": 0, "dry_multiplier": 0.0, "top_n_sigma": -1.0, "logit_bias": [], "grammar": "", "n": 1}
    more = {
        "n_probs": 0,
        "logprobs": False,
        "ignore_eos": False,
        "samplers": None,
        "t_max_predict_ms": -1,
        "echo": False,
    }
    assert options({**neutral, **more, "unknown": 5}) == DEFAULTS


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "a", "temperature": "hot"}, "Field 'temperature' must be a number, but got 'hot'"),
        ({"prompt": "a", "top_k": 1.5}, "Field 'top_k' must be an integer, but got 1.5"),
        ({"prompt": "a", "n_predict": -2}, "Field 'n_predict' must be -1 or more"),
        ({"prompt": "a", "stop": [1]}, "Field 'stop' must be a string or an array of strings"),
        ({"prompt": "a", "json_schema": 3}, "Field 'json_schema' must be an object"),
        ({}, '"prompt" must be a string'),
    ],
)
def test_wrong_values_are_refused_with_the_fields_name(body, message):
    with pytest.raises(InvalidRequest) as caught:
        completion_request(body, "m")
    assert message in caught.value.message


@pytest.mark.parametrize("prompt", ["a", ["a"], {"prompt_string": "a"}])
def test_a_prompt_is_one_text(prompt):
    assert completion_request({"prompt": prompt}, "m")["prompt"] == "a"


@pytest.mark.parametrize("prompt", [[1, 2], ["a", "b"], [[1]]])
def test_tokens_and_several_prompts_are_501(prompt):
    with pytest.raises(NotSupported, match="Field 'prompt'"):
        completion_request({"prompt": prompt}, "m")


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"json_schema": {"type": "array"}}, {"type": "array"}),
        ({"json_schema": {}}, "json"),
        ({"response_format": {"type": "json_object"}}, "json"),
        ({"response_format": {"type": "json_object", "schema": {"type": "array"}}}, {"type": "array"}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}}}, {"type": "null"}),
        ({"response_format": {"type": "text"}}, None),
    ],
)
def test_schemas_become_the_format(fields, form):
    assert chat_request({"messages": [], **fields}, "m").get("format") == form


def test_a_chat_keeps_its_messages():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}, {"role": "assistant"}]
    request = chat_request({"messages": messages, "reasoning_effort": "none", "keep_alive": "1h"}, "m")
    assert request == {
        "model": "m",
        "options": DEFAULTS,
        "keep_alive": "1h",
        "think": False,
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": ""},
        ],
    }


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({}, InvalidRequest),
        ({"messages": "hi"}, InvalidRequest),
        ({"messages": [{"content": "a"}]}, InvalidRequest),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, NotSupported),
        ({"messages": [], "tools": [{}]}, NotSupported),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, NotSupported),
        ({"messages": [], "chat_template_kwargs": {"x": 1}}, NotSupported),
        ({"messages": [], "response_format": {"type": "xml"}}, InvalidRequest),
    ],
)
def test_chats_that_ollama_cannot_hold_are_refused(body, error):
    with pytest.raises(error):
        chat_request(body, "m")


def events(data):
    blocks = data.decode().split("\n\n")[:-1]
    assert all(block.startswith("data: ") for block in blocks)
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


GENERATED = [{"response": "Ah", "done": False}, {"response": "oy\n", "done": False}, {**LAST, "response": ""}]
CHATTED = [
    {"message": {"role": "assistant", "content": "", "thinking": "Hm."}, "done": False},
    {"message": {"role": "assistant", "content": "Ahoy"}, "done": False},
    {**LAST, "message": {"role": "assistant", "content": ""}},
]


async def of(items):
    for item in items:
        yield item


def test_a_native_stream_has_llama_servers_events():
    request = completion_request({"prompt": "Hi", "n_predict": 2}, "m")
    answer = NativeAnswer(request, "smollm2")
    *parts, last = events(b"".join(map(answer.event, GENERATED)) + answer.end)
    assert [(part["content"], part["stop"], part["tokens_predicted"]) for part in parts] == [
        ("Ah", False, 1),
        ("oy\n", False, 2),
    ]
    assert (last["content"], last["stop"], last["stop_type"], last["has_new_line"]) == ("", True, "limit", True)
    assert (last["tokens_evaluated"], last["tokens_predicted"], last["model"]) == (5, 2, "smollm2")
    assert last["generation_settings"]["n_predict"] == 2
    assert (last["timings"]["prompt_ms"], last["timings"]["predicted_per_second"]) == (10.0, 50.0)


async def test_whole_answers_have_the_text_and_the_figures():
    native = await collected(NativeAnswer({"prompt": "Hi"}, "a"), of(GENERATED))
    assert (native["content"], native["stop_type"], native["prompt"]) == ("Ahoy\n", "limit", "Hi")
    completion = await collected(CompletionAnswer("a"), of(GENERATED))
    assert completion["choices"] == [{"text": "Ahoy\n", "index": 0, "logprobs": None, "finish_reason": "length"}]
    assert (completion["object"], completion["usage"]["total_tokens"]) == ("text_completion", 7)
    chat = await collected(ChatAnswer("a"), of(CHATTED))
    message = {"role": "assistant", "content": "Ahoy", "reasoning_content": "Hm."}
    assert chat["choices"] == [{"finish_reason": "length", "index": 0, "message": message}]
    assert (chat["object"], chat["model"]) == ("chat.completion", "a")


def test_an_openai_completion_stream_ends_with_usage_and_done():
    answer = CompletionAnswer("a")
    *parts, last, done = events(b"".join(map(answer.event, GENERATED)) + answer.end)
    assert [part["choices"][0]["text"] for part in parts] == ["Ah", "oy\n"]
    assert (last["choices"][0]["finish_reason"], last["usage"]["prompt_tokens"], done) == ("length", 5, "[DONE]")
    assert len({part["id"] for part in [*parts, last]}) == 1


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_chat_stream_opens_with_the_role_and_ends_with_the_reason(include_usage):
    answer = ChatAnswer("a", include_usage)
    *chunks, done = events(b"".join(map(answer.event, CHATTED)) + answer.end)
    usage = chunks.pop() if include_usage else None
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": None},
        {"reasoning_content": "Hm."},
        {"content": "Ahoy"},
        {},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert ("timings" in chunks[-1]) is not include_usage
    if usage:
        assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 2)
    assert done == "[DONE]"
