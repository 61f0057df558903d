"""The worker's HTTP application over a scripted engine: shapes, streams, errors, cancellation."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientSession, UnixConnector, web
from scripted import ScriptedEngine, spoken, timings

from loraproxy.config import WorkerAdapter
from loraproxy.errors import ContextExceeded, ServerError
from loraproxy.worker.app import MAX_BODY_BYTES, UNSUPPORTED, WorkerApp
from loraproxy.worker.types import Candidate, Done, Event, Progress, Token, TokenProbs

ADAPTERS = (WorkerAdapter(id=0, name="pirate", path="pirate"), WorkerAdapter(id=3, name="bard", path="bard"))


class Servers:
    """Starts worker applications on unix sockets, with a client for each; closes them all at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._closing: list[Callable[[], Awaitable[None]]] = []

    async def listen(self, worker: WorkerApp) -> ClientSession:
        runner = web.AppRunner(worker.app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        path = str(self._folder / f"{len(self._closing)}.sock")
        await web.UnixSite(runner, path).start()
        client = ClientSession("http://worker", connector=UnixConnector(path))
        self._closing += [client.close, runner.cleanup]
        return client

    async def start(self, script: Sequence[Event | Exception]) -> tuple[ClientSession, ScriptedEngine]:
        engine, worker = ScriptedEngine(script), WorkerApp(ADAPTERS)
        worker.serve(engine)  # type: ignore[arg-type]
        return await self.listen(worker), engine

    async def close(self) -> None:
        for close in self._closing:
            await close()


@pytest_asyncio.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Servers]:
    started = Servers(tmp_path)
    yield started
    await started.close()


async def post(client: ClientSession, path: str, body: Any) -> tuple[int, Any]:
    async with client.post(path, json=body) as response:
        return response.status, await response.json()


async def stream(client: ClientSession, path: str, body: Any) -> list[Any]:
    """The data of every server-sent event, parsed except for [DONE]."""
    async with client.post(path, json=body) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream"
        text = (await response.read()).decode()
    assert text.endswith("\n\n")
    events = [block.removeprefix("data: ") for block in text.split("\n\n")[:-1]]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


async def test_everything_answers_503_until_the_model_is_loaded(servers: Servers) -> None:
    client = await servers.listen(WorkerApp(ADAPTERS))
    expected = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
    for method, path in (("GET", "/health"), ("POST", "/completion"), ("GET", "/nowhere")):
        async with client.request(method, path) as response:
            assert (response.status, await response.json()) == (503, expected)


async def test_health_is_503_while_the_engine_hangs(servers: Servers) -> None:
    client, engine = await servers.start([])
    engine.in_step = 301.0
    async with client.get("/health") as response:
        assert response.status == 503
        assert (await response.json())["error"]["message"] == "the engine has been in one step for 301 s"


async def test_health_is_ok_once_the_model_is_loaded(servers: Servers) -> None:
    client, _ = await servers.start([])
    async with client.get("/health") as response:
        assert (response.status, await response.json()) == (200, {"status": "ok"})
        assert response.headers["Content-Type"] == "application/json; charset=utf-8"


@pytest.mark.parametrize(("method", "path"), [("GET", "/nowhere"), ("GET", "/completion"), ("PUT", "/health")])
async def test_an_unknown_path_or_method_is_llama_servers_404(servers: Servers, method: str, path: str) -> None:
    client, _ = await servers.start([])
    async with client.request(method, path) as response:
        error = {"code": 404, "message": "File Not Found", "type": "not_found_error"}
        assert (response.status, await response.json()) == (404, {"error": error})


async def test_what_only_llama_server_has_is_501(servers: Servers) -> None:
    client, _ = await servers.start([])
    for method, pattern in UNSUPPORTED:
        path = pattern.replace("{id_slot}", "0")
        async with client.request(method, path) as response:
            body = await response.json()
            assert (response.status, body["error"]["type"]) == (501, "not_supported_error"), path
            assert path in body["error"]["message"]


async def test_a_completion_is_collected(servers: Servers) -> None:
    client, engine = await servers.start(spoken("héy"))
    status, body = await post(
        client, "/completion", {"prompt": "ab", "return_tokens": True, "lora": [{"id": 3, "scale": 2}]}
    )
    assert status == 200
    assert body["content"] == "héy"
    assert body["tokens"] == [104, 233, 121]
    assert (body["stop"], body["stop_type"], body["tokens_predicted"], body["tokens_evaluated"]) == (True, "eos", 3, 3)
    assert body["prompt"] == "<s>ab"
    assert body["generation_settings"]["lora"] == [{"id": 3, "scale": 2.0}]
    assert body["timings"]["predicted_per_token_ms"] == 2.0
    assert engine.seen[0].prompt == (256, 97, 98)


async def test_a_completion_is_streamed_token_by_token(servers: Servers) -> None:
    client, _ = await servers.start(spoken('a"\n'))
    events = await stream(client, "/completion", {"prompt": "ab", "stream": True})
    assert [e["content"] for e in events] == ["a", '"', "\n", ""]
    assert [e["tokens_predicted"] for e in events] == [1, 2, 3, 3]
    assert events[0] == {
        "index": 0,
        "content": "a",
        "tokens": [97],
        "stop": False,
        "id_slot": -1,
        "tokens_predicted": 1,
        "tokens_evaluated": 3,
    }
    assert events[-1]["stop"] is True
    assert events[-1]["has_new_line"] is True


async def test_openai_streams_end_with_done(servers: Servers) -> None:
    client, _ = await servers.start(spoken("ab"))
    events = await stream(client, "/v1/completions", {"prompt": "x", "stream": True})
    assert events[-1] == "[DONE]"
    assert [e["choices"][0]["text"] for e in events[:-1]] == ["a", "b", ""]
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None, None, "stop"]
    assert events[-2]["usage"]["completion_tokens"] == 2
    assert len({(e["id"], e["created"]) for e in events[:-1]}) == 1


async def test_a_chat_stream_opens_with_the_role_and_closes_with_usage(servers: Servers) -> None:
    client, _ = await servers.start(spoken("ab"))
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "stream_options": {"include_usage": True}}
    *events, usage, done = await stream(client, "/v1/chat/completions", body)
    assert [e["choices"][0]["delta"] for e in events] == [
        {"role": "assistant", "content": None},
        {"content": "a"},
        {"content": "b"},
        {},
    ]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert "timings" in usage
    assert done == "[DONE]"


async def test_a_prefilled_answer_is_repeated_from_its_start(servers: Servers) -> None:
    client, _ = await servers.start(spoken("ab"))
    body = {"messages": [{"role": "assistant", "content": "Sure, "}]}
    _, whole = await post(client, "/v1/chat/completions", body)
    assert whole["choices"][0]["message"]["content"] == "Sure, ab"
    events = await stream(client, "/v1/chat/completions", {**body, "stream": True})
    assert [e["choices"][0]["delta"].get("content") for e in events[:-1]] == [None, "Sure, a", "b", None]


async def test_text_that_was_held_back_is_sent_before_the_end(servers: Servers) -> None:
    script = [Token(97, "", None, timings(1)), Done("he", "limit", "", timings(1), False, False, 4)]
    client, _ = await servers.start(script)
    events = await stream(client, "/v1/chat/completions", {"messages": [], "stream": True})
    assert [e["choices"][0]["delta"] for e in events[:-1]] == [
        {"role": "assistant", "content": None},
        {"content": "he"},
        {},
    ]
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    _, body = await post(client, "/completion", {"prompt": "x"})
    assert body["content"] == "he"


async def test_progress_and_timings_are_shown_when_asked_for(servers: Servers) -> None:
    client, engine = await servers.start([Progress(10, 2, 6, 3.7), *spoken("a")])
    request = {"prompt": "x", "stream": True, "return_progress": True, "timings_per_token": True}
    events = await stream(client, "/completion", request)
    assert events[0]["prompt_progress"] == {"total": 10, "cache": 2, "processed": 6, "time_ms": 3}
    assert events[1]["timings"]["predicted_n"] == 1
    assert engine.seen[0].return_progress
    chat = await stream(client, "/v1/chat/completions", {"messages": [], **request})
    assert chat[0]["prompt_progress"]["processed"] == 6
    assert chat[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}


async def test_probabilities_have_llama_servers_shape(servers: Servers) -> None:
    half, never = Candidate(97, "é".encode()[:1], -0.5, 0.6), Candidate(98, b"b", float("-inf"), 0.0)
    client, _ = await servers.start(spoken("a", TokenProbs(half, (half, never))))
    _, body = await post(client, "/completion", {"prompt": "x", "n_probs": 2})
    top = [
        {"id": 97, "token": "", "bytes": [195], "logprob": -0.5},
        {"id": 98, "token": "b", "bytes": [98], "logprob": -3.4028234663852886e38},
    ]
    assert body["completion_probabilities"] == [{**top[0], "top_logprobs": top}]
    _, body = await post(client, "/completion", {"prompt": "x", "n_probs": 2, "post_sampling_probs": True})
    assert body["completion_probabilities"][0]["top_probs"][0] == {"id": 97, "token": "", "bytes": [195], "prob": 0.6}
    events = await stream(client, "/v1/completions", {"prompt": "x", "logprobs": 2, "stream": True})
    assert events[0]["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == top
    _, body = await post(client, "/v1/chat/completions", {"messages": [], "logprobs": True, "top_logprobs": 2})
    assert body["choices"][0]["logprobs"]["content"][0]["id"] == 97


async def test_response_fields_select_and_keep_their_paths(servers: Servers) -> None:
    client, _ = await servers.start(spoken("a"))
    fields = ["content", "generation_settings/n_predict", "nothing", "content/x"]
    _, body = await post(client, "/completion", {"prompt": "x", "response_fields": fields})
    assert body == {"content": "a", "generation_settings/n_predict": -1}


async def test_several_prompts_and_completions_have_their_own_index(servers: Servers) -> None:
    client, engine = await servers.start(spoken("a"))
    _, body = await post(client, "/completion", {"prompt": ["x", "y"], "n": 2})
    assert [answer["index"] for answer in body] == [0, 1, 2, 3]
    _, body = await post(client, "/v1/completions", {"prompt": ["x", "y"]})
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 2
    events = await stream(client, "/v1/completions", {"prompt": ["x", "y"], "stream": True})
    assert events[-1] == "[DONE]"
    assert sorted(e["choices"][0]["index"] for e in events[:-1]) == [0, 0, 1, 1]
    assert engine.running == 0


async def test_an_empty_prompt_gives_an_empty_answer(servers: Servers) -> None:
    client, engine = await servers.start(spoken("a"))
    status, body = await post(client, "/completion", {"prompt": [[]]})
    assert (status, body["content"], body["tokens_predicted"]) == (200, "", 0)
    assert body["stop_type"] == "none"
    assert engine.seen == []


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_error_before_the_first_event_has_its_own_status(servers: Servers, streamed: bool) -> None:
    client, _ = await servers.start([ContextExceeded(50, 32)])
    status, body = await post(client, "/completion", {"prompt": "x", "stream": streamed})
    assert status == 400
    assert body["error"]["type"] == "exceed_context_size_error"
    assert (body["error"]["n_prompt_tokens"], body["error"]["n_ctx"]) == (50, 32)


@pytest.mark.parametrize(
    ("error", "kind"), [(ServerError("decode failed"), "server_error"), (RuntimeError("bug"), "server_error")]
)
async def test_an_error_within_a_stream_is_an_event(servers: Servers, error: Exception, kind: str) -> None:
    client, _ = await servers.start([Token(97, "a", None, timings(1)), error])
    events = await stream(client, "/v1/completions", {"prompt": "x", "stream": True})
    assert events[0]["choices"][0]["text"] == "a"
    assert events[-1]["error"]["type"] == kind
    assert "bug" not in events[-1]["error"]["message"]


async def test_a_fault_of_ours_is_a_500_without_its_details(servers: Servers) -> None:
    client, _ = await servers.start([RuntimeError("secret")])
    status, body = await post(client, "/completion", {"prompt": "x"})
    assert (status, body["error"]["type"]) == (500, "server_error")
    assert "secret" not in body["error"]["message"]


@pytest.mark.parametrize("body", [{"prompt": "x", "stream": True}, {"prompt": ["x", "y"], "stream": True}])
async def test_a_client_that_goes_away_within_a_stream_ends_its_generations(servers: Servers, body: Any) -> None:
    client, engine = await servers.start([Token(97, "a", None, timings(1))])
    async with client.post("/completion", json=body) as response:
        await response.content.readline()
        response.close()
    await asyncio.wait_for(engine.ended.wait(), 10)
    assert engine.running == 0


async def test_a_client_that_goes_away_while_it_waits_ends_its_generation(servers: Servers) -> None:
    client, engine = await servers.start([])
    waiting = asyncio.create_task(post(client, "/completion", {"prompt": "x"}))
    await asyncio.wait_for(engine.started.wait(), 10)
    waiting.cancel()
    await asyncio.wait_for(engine.ended.wait(), 10)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {}),
        ("/completion", {"prompt": "x", "lora": [{"id": 1, "scale": 1}]}),
        ("/v1/completions", {"prompt": "x", "temperature": "hot"}),
        ("/v1/chat/completions", {}),
        ("/tokenize", {"content": 5}),
        ("/detokenize", {"tokens": "abc"}),
        ("/detokenize", {"tokens": [999]}),
        ("/apply-template", {"messages": 1}),
    ],
)
async def test_a_wrong_request_is_a_400(servers: Servers, path: str, body: Any) -> None:
    client, _ = await servers.start([])
    status, answer = await post(client, path, body)
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (400, 400, "invalid_request_error")


async def test_broken_json_is_a_400_and_a_huge_body_a_413(servers: Servers) -> None:
    client, _ = await servers.start([])
    async with client.post("/completion", data=b'{"prompt": ') as response:
        assert response.status == 400
        assert "parse error at line 1, column 12" in (await response.json())["error"]["message"]
    async with client.post("/completion", data=BytesIO(bytes(MAX_BODY_BYTES + 1))) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (413, 413)


@pytest.mark.parametrize("field", [{"echo": True}, {"suffix": "x"}, {"best_of": 3}])
async def test_openai_fields_that_would_change_the_answer_are_501(servers: Servers, field: dict[str, Any]) -> None:
    client, _ = await servers.start(spoken("a"))
    status, _ = await post(client, "/v1/completions", {"prompt": "x", **field})
    assert status == 501


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": ["x"] * 1025}, "asks for 1025 completions; at most 1024"),
        ({"prompt": ["x"] * 600, "n": 2}, "asks for 1200 completions; at most 1024"),
        ({"prompt": ["x"] * 600, "n_probs": 256}, "probabilities of 4915200 tokens, but at most 4000000"),
        ({"prompt": ["x"] * 1000, "n_probs": 256, "n_predict": 16}, "probabilities of 4096000 tokens"),
    ],
)
async def test_one_request_cannot_ask_for_more_than_the_memory_holds(servers: Servers, body: Any, message: str) -> None:
    client, engine = await servers.start(spoken("x"))
    status, answer = await post(client, "/completion", body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert message in answer["error"]["message"]
    assert not engine.seen


async def test_a_large_body_is_read_beside_the_event_loop(servers: Servers) -> None:
    """A stream goes on while a long prompt is tokenized: the tokenizer waits for the stream's next event."""
    client, engine = await servers.start(spoken("x"))
    loop, passed = asyncio.get_running_loop(), threading.Event()
    tokenize = engine.model.tokenize

    def slow(text: str, **options: bool) -> list[int]:
        loop.call_soon_threadsafe(passed.set)
        assert passed.wait(10), "the event loop stands still"
        return tokenize(text[:3], **options)

    engine.model.tokenize = slow  # type: ignore[method-assign]
    long = "x" * 20_000
    for path, body in {
        "/completion": {"prompt": long},
        "/v1/completions": {"prompt": long},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": long}]},
        "/tokenize": {"content": long},
    }.items():
        passed.clear()
        assert (await post(client, path, body))[0] == 200


async def test_tokenize_and_detokenize(servers: Servers) -> None:
    client, _ = await servers.start([])
    assert await post(client, "/tokenize", {"content": "é"}) == (200, {"tokens": [195, 169]})
    assert await post(client, "/tokenize", {}) == (200, {"tokens": []})
    _, body = await post(client, "/tokenize", {"content": "<s>é", "add_special": True, "with_pieces": True})
    assert body["tokens"] == [
        {"id": 256, "piece": "<s>"},
        {"id": 256, "piece": "<s>"},
        {"id": 195, "piece": [195]},
        {"id": 169, "piece": [169]},
    ]
    _, body = await post(client, "/tokenize", {"content": "<s>", "parse_special": False})
    assert body["tokens"] == [60, 115, 62]
    assert await post(client, "/detokenize", {"tokens": [256, 195, 169]}) == (200, {"content": "<s>é"})
    assert await post(client, "/detokenize", {}) == (200, {"content": ""})


async def test_apply_template_gives_the_prompt(servers: Servers) -> None:
    client, _ = await servers.start([])
    _, body = await post(client, "/apply-template", {"messages": [{"role": "user", "content": "x"}]})
    assert body == {"prompt": "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"}


async def test_slots_show_what_runs_and_can_fail_when_all_are_busy(servers: Servers) -> None:
    client, engine = await servers.start([])
    async with client.get("/slots") as response:
        busy, idle = await response.json()
    assert (busy["is_processing"], busy["id_task"], busy["next_token"][0]["n_decoded"]) == (True, 7, 1)
    assert idle == {"id": 1, "n_ctx": 32, "speculative": False, "is_processing": False}
    async with client.get("/slots?fail_on_no_slot=1") as response:
        assert response.status == 200
    slots = engine.slots()[:1]
    engine.slots = lambda: slots  # type: ignore[method-assign]
    async with client.get("/slots?fail_on_no_slot=1") as response:
        assert response.status == 503


async def test_metrics_are_prometheus_text_and_speeds_are_since_the_last_scrape(servers: Servers) -> None:
    client, _ = await servers.start([])
    async with client.get("/metrics") as response:
        first = await response.text()
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    async with client.get("/metrics") as response:
        second = await response.text()
    assert "# TYPE llamacpp:prompt_tokens_total counter\nllamacpp:prompt_tokens_total 10\n" in first
    assert "llamacpp:predicted_tokens_seconds 2\n" in first
    assert "llamacpp:predicted_tokens_seconds 0\n" in second


async def test_models_props_and_adapters_are_listed(servers: Servers) -> None:
    client, _ = await servers.start([])
    async with client.get("/v1/models") as response:
        models = await response.json()
    assert (models["data"][0]["id"], models["data"][0]["meta"]["n_ctx"]) == ("bytes", 32)
    async with client.get("/props") as response:
        props = await response.json()
    assert (props["total_slots"], props["chat_template_caps"]["supports_system_role"]) == (4, True)
    async with client.get("/lora-adapters") as response:
        adapters = await response.json()
    assert [(a["id"], a["path"]) for a in adapters] == [(0, "pirate"), (3, "bard")]
