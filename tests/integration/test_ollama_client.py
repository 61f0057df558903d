"""Ollama's own client against its API over the embedded worker."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import ollama
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loraproxy.errors import ApiError, WorkerFailed
from loraproxy.proxy.ollama_answers import OllamaAnswer
from loraproxy.proxy.ollama_relay import error_response, relay
from loraproxy.proxy.ollama_wire import Call, asks_for_nothing, chat_call, generate_call
from servers import Server

OPTIONS = {"temperature": 0, "num_predict": 12, "seed": 1}
MESSAGES: Sequence[dict[str, str]] = [{"role": "user", "content": "Hello!"}]


def application(session: aiohttp.ClientSession) -> web.Application:
    """Nothing but Ollama's two generating endpoints over one worker."""

    async def serve(request: web.Request) -> web.StreamResponse:
        make, field = {"/api/chat": (chat_call, "message"), "/api/generate": (generate_call, "response")}[request.path]
        try:
            body: dict[str, Any] = await request.json()
            call: Call = make(body)
            answer = OllamaAnswer(str(body["model"]), field)
            if reason := asks_for_nothing(body):
                return web.json_response(answer.nothing(reason))
            async with session.post(f"http://worker{call.path}", json=call.body) as upstream:
                return await relay(request, upstream, answer, broken=lambda: WorkerFailed("it died"), headers={})
        except ApiError as error:
            return error_response(error)

    app = web.Application()
    app.router.add_post("/api/chat", serve)
    app.router.add_post("/api/generate", serve)
    return app


@pytest.fixture
async def client(worker: Server) -> AsyncIterator[ollama.AsyncClient]:
    assert worker.socket is not None
    connector = aiohttp.UnixConnector(str(worker.socket))
    async with aiohttp.ClientSession(connector=connector) as session, TestServer(application(session)) as server:
        client = ollama.AsyncClient(str(server.make_url("")))
        yield client
        await client.close()


async def test_chats_whole_and_streamed_say_the_same(client: ollama.AsyncClient) -> None:
    whole = await client.chat("smollm2:latest", MESSAGES, options=OPTIONS)
    parts = [part async for part in await client.chat("smollm2:latest", MESSAGES, options=OPTIONS, stream=True)]
    assert whole.message.content
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    for last in (whole, parts[-1]):
        assert (last.model, last.done_reason, last.eval_count) == ("smollm2:latest", "length", 12)
        assert last.prompt_eval_count
        assert last.total_duration


async def test_a_generation_is_a_chat_of_its_prompt_unless_it_is_raw(client: ollama.AsyncClient) -> None:
    chat = await client.chat("smollm2", MESSAGES, options=OPTIONS)
    generated = await client.generate("smollm2", "Hello!", options=OPTIONS)
    assert generated.response == chat.message.content
    raw = [part async for part in await client.generate("smollm2", "Hello!", raw=True, options=OPTIONS, stream=True)]
    assert "".join(part.response or "" for part in raw) != generated.response
    assert (raw[-1].done_reason, raw[-1].eval_count) == ("length", 12)


async def test_the_format_is_kept(client: ollama.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    options = {**OPTIONS, "num_predict": 64}
    answer = await client.chat("smollm2", MESSAGES, format=schema, options=options)
    assert isinstance(json.loads(answer.message.content or "")["age"], int)
    raw = await client.generate("smollm2", "An age: ", raw=True, format=schema, options=options)
    assert isinstance(json.loads(raw.response or "")["age"], int)


async def test_a_request_without_a_prompt_is_answered_at_once(client: ollama.AsyncClient) -> None:
    assert (await client.generate("smollm2")).done_reason == "load"
    assert (await client.chat("smollm2", [], keep_alive=0)).done_reason == "unload"


async def test_refusals_are_the_clients_errors(client: ollama.AsyncClient) -> None:
    for arguments, status, words in (
        ({"options": {"temperature": "hot"}}, 400, 'option "temperature" must be of type float32'),
        ({"suffix": "x"}, 501, "'suffix' is not supported"),
    ):
        with pytest.raises(ollama.ResponseError) as caught:
            await client.generate("smollm2", "a", **arguments)  # type: ignore[arg-type]
        assert (caught.value.status_code, words in caught.value.error) == (status, True)


async def test_the_workers_own_refusals_keep_status_and_words(client: ollama.AsyncClient) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        await client.generate("smollm2", "word " * 4000, raw=True, options=OPTIONS)
    assert caught.value.status_code == 400
    assert "exceeds the available context size" in caught.value.error
