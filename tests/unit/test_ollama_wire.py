"""Ollama's API over llama-server's: requests one way, answers and streams the other."""

import json
from contextlib import asynccontextmanager
from datetime import datetime, timezone

import aiohttp
import ollama
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loraproxy.errors import InvalidRequest, NotSupported, Unavailable, WorkerFailed
from loraproxy.proxy.ollama_answers import (
    ModelFacts,
    OllamaAnswer,
    embed_answer,
    error_body,
    human_number,
    ps_answer,
    show_answer,
    tags_answer,
)
from loraproxy.proxy.ollama_relay import error_response, relay
from loraproxy.proxy.ollama_wire import Call, asks_for_nothing, chat_call, embed_call, generate_call, model_of

DEFAULTS = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repeat_last_n": 64,
    "repeat_penalty": 1.1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "seed": -1,
    "n_keep": 4,
    "n_predict": -1,
    "stop": [],
}
FACTS = ModelFacts(
    "pirate", "ab" * 32, 5, datetime(2025, 1, 2, tzinfo=timezone.utc), "llama", "134.52M", "Q4_1", "base"
)


def test_a_prompt_becomes_a_chat_with_ollamas_defaults():
    call = generate_call({"model": "pirate:latest", "prompt": "Ahoy", "system": "Be brief."})
    assert call == Call(
        "/v1/chat/completions",
        {
            "model": "pirate",
            **DEFAULTS,
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Ahoy"}],
        },
    )
    assert call.streams


def test_a_raw_prompt_becomes_a_completion():
    call = generate_call({"model": "base", "prompt": "Ahoy", "raw": True, "stream": False, "format": "json"})
    schema = {"json_schema": {"type": "object"}}
    assert call == Call("/completion", {"model": "base", **DEFAULTS, "stream": False, **schema, "prompt": "Ahoy"})
    assert not call.streams


def test_options_have_llama_servers_names():
    options = {"num_predict": 7, "num_keep": 1, "stop": ["\n"], "temperature": 0, "seed": 3, "num_ctx": 99, "new": [1]}
    body = generate_call({"model": "base", "prompt": "a", "options": options}).body
    changed = {"n_predict": 7, "n_keep": 1, "stop": ["\n"], "temperature": 0, "seed": 3}
    assert {name: body[name] for name in DEFAULTS} == {**DEFAULTS, **changed}
    assert not {"num_ctx", "new"} & body.keys()


@pytest.mark.parametrize("limit", [0, -1, -2])
def test_no_limit_is_no_limit(limit):
    assert generate_call({"model": "m", "prompt": "a", "options": {"num_predict": limit}}).body["n_predict"] == -1


def test_what_selects_an_adapter_is_passed_on():
    selectors = {"lora": ["pirate"], "adapter_id": "x", "parameters": {"adapter_id": "y"}}
    assert chat_call({"model": "m", "messages": [], **selectors}).body.items() >= selectors.items()


def test_messages_and_tools_are_those_of_openai():
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    called = {"function": {"name": "add", "arguments": {"a": 1}}}
    call = chat_call(
        {
            "model": "m",
            "messages": [
                {"role": "User", "content": "1+1?"},
                {"role": "assistant", "tool_calls": [called]},
                {"role": "tool", "content": "2", "tool_name": "add"},
            ],
            "tools": [tool],
            "format": {"type": "array"},
            "think": False,
        }
    )
    assert call.body["messages"] == [
        {"role": "user", "content": "1+1?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "content": "2", "name": "add"},
    ]
    assert call.body["tools"] == [tool]
    assert call.body["response_format"] == {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}
    assert call.body["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "model is required"),
        ({"model": 3}, "'model' must be a string, but got 3"),
        ({"model": "m", "prompt": 1}, "'prompt' must be a string, but got 1"),
        ({"model": "m", "prompt": "a", "options": 3}, "'options' must be an object"),
        ({"model": "m", "prompt": "a", "options": {"top_k": "x"}}, 'option "top_k" must be of type integer'),
        ({"model": "m", "prompt": "a", "options": {"stop": [1]}}, 'option "stop" must be of an array of strings'),
        ({"model": "m", "prompt": "a", "stream": "no"}, "'stream' must be true or false"),
        ({"model": "m", "prompt": "a", "format": "xml"}, 'invalid format: "xml"'),
        ({"model": "m", "prompt": "a", "keep_alive": []}, "'keep_alive' must be seconds"),
        ({"model": "m", "prompt": "a", "raw": True, "system": "b"}, "raw mode does not support"),
        ({"model": "m", "prompt": "a", "think": "much"}, "'think' must be true, false"),
    ],
)
def test_wrong_generations_are_refused_with_the_reason(body, message):
    with pytest.raises(InvalidRequest) as caught:
        generate_call(body)
    assert message in caught.value.message


@pytest.mark.parametrize("messages", ["hi", ["hi"], [{"content": "a"}], [{"role": "user", "content": 1}]])
def test_wrong_messages_are_refused(messages):
    with pytest.raises(InvalidRequest, match="'messages"):
        chat_call({"model": "m", "messages": messages})


@pytest.mark.parametrize("field", ["suffix", "template", "context", "images", "logprobs"])
def test_what_no_worker_can_do_is_501_with_the_fields_name(field):
    value = {"context": [1], "images": ["aGk="], "logprobs": True}.get(field, "x")
    with pytest.raises(NotSupported, match=f"'{field}' is not supported"):
        generate_call({"model": "m", "prompt": "a", field: value})


def test_images_in_messages_are_501():
    with pytest.raises(NotSupported, match="'images'"):
        chat_call({"model": "m", "messages": [{"role": "user", "content": "a", "images": ["aGk="]}]})


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": "a"}, ""),
        ({"messages": [{}]}, ""),
        ({}, "load"),
        ({"keep_alive": "5m"}, "load"),
        ({"keep_alive": -1}, "load"),
        ({"keep_alive": 0}, "unload"),
        ({"keep_alive": "0s"}, "unload"),
        ({"messages": [], "keep_alive": 0}, "unload"),
    ],
)
def test_a_request_without_a_prompt_only_loads_or_unloads(body, reason):
    assert asks_for_nothing(body) == reason


def test_the_tag_latest_is_no_part_of_the_name():
    assert [model_of({"model": name}) for name in ("pirate:latest", "base:pirate", "pirate")] == [
        "pirate",
        "base:pirate",
        "pirate",
    ]
    assert model_of({"name": "old"}) == "old"


def event(value):
    return b"data: %b\n\n" % (value if isinstance(value, bytes) else json.dumps(value).encode())


def chunk(delta, reason=None, **more):
    return {"choices": [{"finish_reason": reason, "index": 0, "delta": delta}], **more}


TIMINGS = {"prompt_n": 3, "prompt_ms": 2.0, "predicted_n": 2, "predicted_ms": 4.0}
CHAT = [
    chunk({"role": "assistant", "content": None}),
    chunk({"content": "Ah"}),
    chunk({"content": "oy ⚓"}),
    chunk({}, "length"),
    {"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 5}, "timings": TIMINGS},
]
NATIVE = [
    {"index": 0, "content": "Ah", "stop": False},
    {"index": 0, "content": "oy ⚓", "stop": False},
    {
        "content": "",
        "stop": True,
        "stop_type": "limit",
        "tokens_evaluated": 5,
        "tokens_predicted": 2,
        "timings": TIMINGS,
    },
]
STREAMS = {"chat": b"".join(map(event, [*CHAT, b"[DONE]"])), "native": b": ping\n\n" + b"".join(map(event, NATIVE))}


def lines(data):
    return [json.loads(line) for line in data.splitlines()]


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("field", ["response", "message"])
@pytest.mark.parametrize("source", ["chat", "native"])
def test_a_stream_becomes_lines_however_it_is_cut(source, field, size):
    answer, data = OllamaAnswer("pirate", field), STREAMS[source]
    out = b"".join(answer.feed(data[i : i + size]) for i in range(0, len(data), size))
    assert answer.ended
    assert answer.close(WorkerFailed("too late")) == b""
    *parts, last = lines(out)
    kind = ollama.ChatResponse if field == "message" else ollama.GenerateResponse
    texts = [part.message.content if field == "message" else part.response for part in map(kind.model_validate, parts)]
    assert texts == ["Ah", "oy ⚓"]
    assert all(part["done"] is False and part["model"] == "pirate" for part in parts)
    assert (last["done"], last["done_reason"]) == (True, "length")
    figures = ("prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration")
    assert [last[name] for name in figures] == [5, 2_000_000, 2, 4_000_000]
    assert last["total_duration"] > 0


def test_a_whole_answer_is_one_object():
    message = {"role": "assistant", "content": "Ahoy", "reasoning_content": "Hm."}
    choice = {"finish_reason": "stop", "message": message}
    usage = {"completion_tokens": 2, "prompt_tokens": 5}
    whole = OllamaAnswer("m", "message").whole({"choices": [choice], "usage": usage, "timings": TIMINGS})
    assert whole["message"] == {"role": "assistant", "content": "Ahoy", "thinking": "Hm."}
    assert (whole["done"], whole["done_reason"], whole["eval_count"]) == (True, "stop", 2)
    native = OllamaAnswer("m", "response").whole({**NATIVE[-1], "content": "Ahoy"})
    assert (native["response"], native["done_reason"], native["prompt_eval_count"]) == ("Ahoy", "length", 5)


def test_tool_calls_are_put_together_from_their_pieces():
    pieces = [
        {"index": 0, "function": {"name": "add", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a":'}},
    ]
    pieces.append({"index": 0, "function": {"arguments": " 1}"}})
    events = [*(chunk({"tool_calls": [piece]}) for piece in pieces), chunk({}, "tool_calls")]
    answer = OllamaAnswer("m", "message")
    (last,) = lines(b"".join(answer.feed(event(one)) for one in [*events, b"[DONE]"]))
    assert last["message"]["tool_calls"] == [{"function": {"name": "add", "arguments": {"a": 1}}}]
    assert last["done_reason"] == "stop"


def test_an_error_in_the_stream_ends_it_as_ollama_ends_it():
    answer = OllamaAnswer("m", "response")
    failure = {"error": {"code": 502, "message": "the worker died", "type": "server_error"}}
    out = answer.feed(event(NATIVE[0]) + event(failure) + event(NATIVE[1]))
    assert lines(out)[1:] == [{"error": "the worker died"}]
    assert answer.close(WorkerFailed("again")) == b""


def test_an_event_that_is_not_json_ends_the_stream():
    answer = OllamaAnswer("m", "response")
    assert lines(answer.feed(event(b"{") + event(NATIVE[0]))) == [
        {"error": "the worker sent an event that is not JSON"}
    ]


def test_a_stream_that_breaks_off_ends_with_the_error():
    answer = OllamaAnswer("m", "response")
    answer.feed(event(NATIVE[0]) + b'data: {"conte')
    assert lines(answer.close(WorkerFailed("the worker died"))) == [{"error": "the worker died"}]
    assert error_body(WorkerFailed("x")) == {"error": "x"}


@asynccontextmanager
async def relayed(handler):
    """A client's view of a worker's answer that ``handler`` gives."""
    worker_app = web.Application()
    worker_app.router.add_post("/completion", handler)

    async def serve(request):
        async with session.post(worker.make_url("/completion")) as upstream:
            answer = OllamaAnswer("m", "response")
            try:
                return await relay(
                    request, upstream, answer, broken=lambda: WorkerFailed("it died"), headers={"X-LoRA": "pirate=1"}
                )
            except WorkerFailed as error:
                return error_response(error)

    app = web.Application()
    app.router.add_post("/api/generate", serve)
    async with (
        TestServer(worker_app) as worker,
        TestServer(app) as server,
        aiohttp.ClientSession() as session,
        session.post(server.make_url("/api/generate")) as answer,
    ):
        yield answer


async def send(request, *chunks, abort=False):
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk)
    if abort:
        request.transport.abort()
    return response


async def test_a_stream_is_relayed_with_the_headers():
    async def handler(request):
        return await send(request, STREAMS["native"])

    async with relayed(handler) as answer:
        assert (answer.content_type, answer.headers["X-LoRA"]) == ("application/x-ndjson", "pirate=1")
        assert [line["response"] for line in lines(await answer.read())] == ["Ah", "oy ⚓", ""]


@pytest.mark.parametrize("abort", [True, False])
async def test_a_worker_that_dies_in_a_stream_ends_it_with_an_error_line(abort):
    async def handler(request):
        return await send(request, event(NATIVE[0]), abort=abort)

    async with relayed(handler) as answer:
        assert lines(await answer.read())[-1] == {"error": "it died"}


async def test_a_worker_that_dies_before_it_answers_is_502():
    async def handler(request):
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "99"})
        await response.prepare(request)
        request.transport.abort()
        return response

    async with relayed(handler) as answer:
        assert (answer.status, await answer.json()) == (502, {"error": "it died"})


async def test_a_workers_refusal_keeps_its_status():
    async def handler(request):
        return web.json_response(Unavailable("busy").body(), status=503)

    async with relayed(handler) as answer:
        assert (answer.status, await answer.json()) == (503, {"error": "busy"})


def test_an_error_says_when_to_come_back():
    assert error_response(Unavailable("busy", retry_after=7)).headers["Retry-After"] == "7"


@pytest.mark.parametrize("field", ["response", "message"])
def test_loading_and_unloading_are_answered_with_nothing(field):
    empty = {"role": "assistant", "content": ""} if field == "message" else ""
    answer = OllamaAnswer("m", field).nothing("unload")
    assert (answer[field], answer["done"], answer["done_reason"]) == (empty, True, "unload")


def test_lists_are_what_the_official_client_reads():
    listed = ollama.ListResponse.model_validate(tags_answer([FACTS])).models[0]
    assert (listed.model, listed.size, listed.details.parent_model) == ("pirate:latest", 5, "base")
    running = ollama.ProcessResponse.model_validate(ps_answer([FACTS], 1024)).models[0]
    assert (running.name, running.context_length) == ("pirate:latest", 1024)
    info = {"general.architecture": "llama"}
    shown = ollama.ShowResponse.model_validate(show_answer(FACTS, template="{{ x }}", model_info=info))
    assert (shown.modelinfo, shown.template, shown.capabilities) == (info, "{{ x }}", ["completion"])


def test_embeddings_keep_their_order():
    assert embed_call({"model": "m", "input": "a"}) == Call("/v1/embeddings", {"model": "m", "input": ["a"]})
    data = [{"index": 1, "embedding": [2.0]}, {"index": 0, "embedding": [1.0]}]
    answer = embed_answer("m", {"data": data, "usage": {"prompt_tokens": 4}}, 9)
    assert (answer["embeddings"], answer["prompt_eval_count"], answer["total_duration"]) == ([[1.0], [2.0]], 4, 9)
    with pytest.raises(InvalidRequest, match="invalid input type"):
        embed_call({"model": "m", "input": [1]})


@pytest.mark.parametrize(("value", "text"), [(134_515_008, "134.52M"), (8_030_261_248, "8.0B"), (999, "999")])
def test_numbers_of_parameters_are_short(value, text):
    assert human_number(value) == text
