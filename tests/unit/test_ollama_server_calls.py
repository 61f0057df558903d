"""The client of Ollama's API against the stand-in, and against servers that misbehave."""

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from ollama_bench import TINY, client_of, digest_of, tiny_adapter, tiny_base, tiny_ollama

from loraproxy.backends.ollama_api import full_name
from loraproxy.backends.ollama_base import base_model, base_model_of
from loraproxy.errors import InvalidRequest, NotFound, NotSupported, ServerError, Unavailable, WorkerFailed
from servers import free_port


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    return tiny_adapter(tmp_path_factory.mktemp("adapter"), "pirate", 1)


@pytest.fixture(scope="module")
def server(tmp_path_factory, base):
    with tiny_ollama(tmp_path_factory.mktemp("ollama"), base) as running:
        yield running


@pytest.fixture
async def client(server):
    async with client_of(server.base_url) as client:
        yield client


async def answers(request: web.Request, *chunks: bytes, status: int = 200) -> web.StreamResponse:
    response = web.StreamResponse(status=status, headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk)
    return response


async def collected(*chunks: bytes, handler=None):
    """What the client makes of a stream that a server sends in these pieces."""

    async def send(request):
        return await answers(request, *chunks)

    app = web.Application()
    app.router.add_post("/api/generate", handler or send)
    async with TestServer(app) as bad, client_of(str(bad.make_url(""))) as client:
        return [event async for event in client.generate({"model": "x"})]


@pytest.mark.parametrize(
    ("name", "full"),
    [("llama3", "llama3:latest"), ("Llama3:8B", "llama3:8b"), ("host:5/me/llama3", "host:5/me/llama3:latest")],
)
def test_a_name_without_a_tag_has_the_tag_latest(name, full):
    assert full_name(name) == full


async def test_it_says_what_the_server_has(client, base):
    assert await client.version() == "0.12.6"
    entry = next(entry for entry in await client.tags() if entry.name == "tiny:latest")
    assert (entry.details["family"], len(entry.digest)) == ("llama", 64)
    assert await client.running() == []
    shown = await client.show(TINY)
    assert shown["model_info"]["general.architecture"] == "llama"
    with pytest.raises(NotFound, match="Ollama: model 'nobody' not found"):
        await client.show("nobody")


async def test_the_base_model_is_read_from_what_the_server_says_of_it(client, base):
    theirs = await base_model(client, TINY)
    for field in ("architecture", "n_layer", "n_vocab", "n_head", "n_head_kv", "tensors"):
        assert getattr(theirs, field) == getattr(base, field)


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        ({}, "which architecture"),
        ({"model_info": {"general.architecture": "llama"}}, "does not list the tensors"),
    ],
)
def test_a_server_that_says_too_little_of_the_base_is_told_apart(shown, reason):
    with pytest.raises(ServerError, match=reason):
        base_model_of("tiny", shown)


async def test_a_model_is_made_with_an_adapter_and_removed(client, adapter):
    digest, statuses = digest_of(adapter), []
    assert not await client.has_blob(digest)
    await client.push_blob(digest, adapter)
    assert await client.has_blob(digest)
    await client.create("derived", TINY, {"a.gguf": digest}, note="made of pirate", on_status=statuses.append)
    assert statuses[-1] == "success"
    shown = await client.show("derived")
    assert digest.removeprefix("sha256:") in shown["modelfile"]
    assert "made of pirate" in shown["license"]
    await client.delete("derived")
    assert "derived:latest" not in {entry.name for entry in await client.tags()}
    assert not await client.has_blob(digest)
    with pytest.raises(NotFound):
        await client.delete("derived")


async def test_what_the_server_refuses_is_raised_with_its_words(client, adapter, tmp_path):
    digest, other = digest_of(adapter), "sha256:" + "ab" * 32
    with pytest.raises(InvalidRequest, match="digest mismatch"):
        await client.push_blob(other, adapter)
    with pytest.raises(InvalidRequest, match="invalid digest format"):
        await client.push_blob("sha256:ab", adapter)
    with pytest.raises(InvalidRequest, match="invalid model name"):
        await client.create("a/b/c/d", TINY, {})
    with pytest.raises(ServerError, match="pull model manifest"):
        await client.create("x", "nobody", {})
    await client.push_blob(digest, adapter)
    with pytest.raises(InvalidRequest, match="only one adapter"):
        await client.create("x", TINY, {"a.gguf": digest, "b.gguf": digest})
    with pytest.raises(ServerError, match="no such file"):
        await client.create("x", TINY, {"a.gguf": other})
    text = tmp_path / "text.gguf"
    text.write_text("not a model")
    await client.push_blob(digest_of(text), text)
    with pytest.raises(ServerError, match="not in GGUF format"):
        await client.create("x", TINY, {"a.gguf": digest_of(text)})
    assert "x:latest" not in {entry.name for entry in await client.tags()}


async def test_it_can_be_asked_whether_it_takes_adapters(client, base, tmp_path):
    assert await client.takes_adapters()
    with tiny_ollama(tmp_path, base, "--refuse-adapters", "--version", "0.34.1") as newer:
        async with client_of(newer.base_url) as other:
            assert not await other.takes_adapters()
            with pytest.raises(NotSupported, match=r"Ollama cannot make models with LoRA adapters .* 0\.34\.1"):
                await other.create("x", TINY, {"a.gguf": "sha256:" + "ab" * 32})
            assert [entry.name for entry in await other.tags()] == ["tiny:latest"]


async def test_a_server_that_is_not_there_is_said_to_be_not_there():
    async with client_of(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(
            Unavailable, match=r"http://127\.0\.0\.1:\d+ cannot be reached .*; is it running\?"
        ) as caught:
            await client.version()
    assert caught.value.retry_after


async def test_lines_of_any_length_arrive_whole_however_they_are_cut():
    long = {"response": "", "done": True, "context": list(range(100_000))}
    data = b'{"response":"a","done":false}\n\n' + json.dumps(long).encode()
    pieces = [data[:10], data[10:40], *(data[i : i + 70_000] for i in range(40, len(data), 70_000))]
    assert await collected(*pieces) == [{"response": "a", "done": False}, long]


async def test_an_error_within_a_stream_is_raised():
    with pytest.raises(ServerError, match="Ollama: the runner died"):
        await collected(b'{"response":"a"}\n', b'{"error":"the runner died"}\n')


@pytest.mark.parametrize("line", [b"<html>", b"[1]", b'{"response": "a'])
async def test_what_is_no_object_is_an_error(line):
    with pytest.raises(WorkerFailed, match="is not the JSON object it should be"):
        await collected(line + b"\n")


async def test_a_broken_connection_is_an_error():
    async def handler(request):
        response = await answers(request, b'{"response":"a"}\n')
        request.transport.abort()
        return response

    with pytest.raises(WorkerFailed, match="broke the connection"):
        await collected(handler=handler)


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (503, b'{"error":"server busy"}', Unavailable),
        (500, b'{"error":"out of memory"}', ServerError),
        (403, b"", ServerError),
        (404, b"404 page not found", NotFound),
        (400, b'{"error":{"message":"odd"}}', InvalidRequest),
    ],
)
async def test_every_refusal_becomes_an_error_of_ours(status, body, error):
    async def handler(request):
        return web.Response(status=status, body=body)

    with pytest.raises(error):
        await collected(handler=handler)


async def test_leaving_a_stream_closes_the_connection():
    gone = asyncio.Event()

    async def handler(request):
        response = await answers(request)
        try:
            while True:
                await response.write(b'{"response":"a","done":false}\n')
                await asyncio.sleep(0.001)
        finally:
            gone.set()

    app = web.Application()
    app.router.add_post("/api/chat", handler)
    async with TestServer(app) as server, client_of(str(server.make_url(""))) as client:
        stream = client.chat({"model": "x"})
        assert (await anext(stream))["response"] == "a"
        await stream.aclose()
        await asyncio.wait_for(gone.wait(), 10)


async def raw(server, method, path, body=None, data=None):
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, server.base_url + path, json=body, data=data) as answer,
    ):
        return answer.status, await answer.text()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        (
            "POST",
            "/api/generate",
            {"model": 3},
            400,
            "cannot unmarshal number into Go struct field GenerateRequest.model",
        ),
        ("POST", "/api/generate", {}, 404, "model '' not found"),
        (
            "POST",
            "/api/generate",
            {"model": "tiny", "prompt": ["a"]},
            400,
            "field GenerateRequest.prompt of type string",
        ),
        ("POST", "/api/generate", {"model": "tiny", "raw": True, "prompt": "a", "system": "b"}, 400, "raw mode"),
        ("POST", "/api/generate", {"model": "tiny", "prompt": "a", "suffix": "b"}, 400, "does not support insert"),
        ("POST", "/api/generate", {"model": "tiny", "prompt": "a", "think": True}, 400, "does not support thinking"),
        ("POST", "/api/generate", {"model": "tiny", "keep_alive": "soon"}, 400, "invalid duration"),
        ("POST", "/api/generate", {"model": "tiny", "prompt": "a", "options": {"top_k": "x"}}, 500, "of type integer"),
        ("POST", "/api/generate", {"model": "tiny", "images": ["??"]}, 400, "illegal base64 data"),
        ("POST", "/api/chat", {"model": ""}, 400, "model is required"),
        ("POST", "/api/chat", {"model": "x"}, 404, "model 'x' not found"),
        ("POST", "/api/chat", {"model": "tiny", "messages": "hi"}, 400, "ChatRequest.messages of type []api.Message"),
        ("POST", "/api/chat", {"model": "tiny", "messages": [{"role": 1}]}, 400, "Message.role of type string"),
        ("POST", "/api/chat", {"model": "tiny", "tools": [{}], "messages": []}, 400, "does not support tools"),
        ("POST", "/api/show", {}, 400, "model is required"),
        ("POST", "/api/create", {"model": "x"}, 400, "neither 'from' or 'files' was specified"),
        (
            "POST",
            "/api/create",
            {"model": "x", "from": "tiny", "adapters": {"a.gguf": ""}},
            400,
            "invalid digest format",
        ),
        ("POST", "/api/create", {"model": "x", "files": {"../a.gguf": "y"}}, 400, "file path must be relative"),
        ("POST", "/api/copy", {"source": "nobody", "destination": "x"}, 404, 'model \\"nobody\\" not found'),
        ("DELETE", "/api/delete", {"model": ""}, 400, 'name \\"\\" is invalid'),
        ("HEAD", "/api/blobs/abc", None, 400, ""),
        ("POST", "/api/embed", {"model": "tiny", "input": [1]}, 400, "invalid input type"),
        ("GET", "/api/generate", None, 405, "405 method not allowed"),
        ("GET", "/api/nothing", None, 404, "404 page not found"),
        ("POST", "/api/generate", None, 400, "missing request body"),
    ],
    ids=lambda value: None if isinstance(value, int) else str(value)[:60],
)
async def test_the_stand_in_refuses_what_ollama_refuses(server, method, path, body, status, words):
    found, text = await raw(server, method, path, body)
    assert (found, words in text) == (status, True), text


async def test_the_stand_in_keeps_its_models_over_a_restart_but_not_loose_blobs(base, adapter, tmp_path):
    digest = digest_of(adapter)
    with tiny_ollama(tmp_path, base) as server:
        async with client_of(server.base_url) as client:
            await client.push_blob(digest, adapter)
            await client.create("kept", TINY, {"a.gguf": digest})
            loose = tmp_path / "loose"
            loose.write_bytes(b"loose")
            await client.push_blob(digest_of(loose), loose)
            before = {entry.name: entry.digest for entry in await client.tags()}
    with tiny_ollama(tmp_path, base) as server:
        async with client_of(server.base_url) as client:
            assert {entry.name: entry.digest for entry in await client.tags()} == before
            assert await client.has_blob(digest)
            assert not await client.has_blob(digest_of(loose))
