"""The Ollama backend over the stand-in, with SmolLM2 and the four characters: text, streams, models made and kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ollama
import pytest

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.gguf_write import write_gguf_adapter
from loraproxy.adapters.read import read_adapter
from loraproxy.backends.embedded import Liveness
from loraproxy.backends.ollama import OllamaBackend, OllamaSettings
from loraproxy.errors import StartFailed
from ollama_process import OllamaServer, running_ollama
from servers import PeerUnavailable, Server, demo_adapters, llama_server_command, running_llama_server

CHARACTERS = tuple(demo_adapters())
GREEDY = {"temperature": 0, "n_predict": 16, "cache_prompt": False}
PROMPT = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
CONTEXT = {"num_ctx": 1024}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[OllamaServer]:
    try:
        llama_server_command()
    except PeerUnavailable as reason:
        pytest.skip(str(reason))
    with running_ollama(tmp_path_factory.mktemp("ollama"), {"smollm2": model}, "--max-loaded", "6") as running:
        yield running


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Server]:
    """A stock llama-server with the four characters, each applied by itself."""
    folder = tmp_path_factory.mktemp("peer")
    base = BaseModel.from_gguf(model)
    loras = []
    for name in CHARACTERS:
        write_gguf_adapter(read_adapter(name, demo_adapters()[name], base), base, folder / f"{name}.gguf", "f32")
        loras += ["--lora", str(folder / f"{name}.gguf")]
    try:
        with running_llama_server(folder, ["-m", str(model), *loras, "-np", "1", "-c", "1024", "-t", "2"]) as running:
            yield running
    except PeerUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
async def client(server: OllamaServer) -> AsyncIterator[ollama.AsyncClient]:
    """Ollama's own client, of the stand-in."""
    client = ollama.AsyncClient(server.base_url)
    yield client
    await client.close()


def alone(peer: Server, scales: dict[str, float]) -> str:
    """What the llama-server says under these adapters."""
    lora = [{"id": number, "scale": scales.get(name, 0.0)} for number, name in enumerate(CHARACTERS)]
    status, _, body = peer.request(
        "POST", "/completion", json.dumps({**GREEDY, "prompt": PROMPT, "lora": lora}).encode()
    )
    assert status == 200, body
    text: str = json.loads(body)["content"]
    return text


class Bench:
    """A started backend, and what the pool does with one."""

    def __init__(self, backend: OllamaBackend) -> None:
        self.backend = backend

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """One request to the bridge."""
        async with self.backend.session.request(method, self.backend.base_url + path, json=body) as answer:
            return answer.status, await answer.read()

    async def text(self, scales: dict[str, float], **fields: Any) -> str:
        """What is said under these adapters, streamed."""
        lora = [{"id": CHARACTERS.index(name), "scale": scale} for name, scale in scales.items()]
        body = {**GREEDY, **CONTEXT, "prompt": PROMPT, "lora": lora, "stream": True, **fields}
        status, data = await self.ask("POST", "/completion", body)
        assert status == 200, data
        events = [json.loads(block[6:]) for block in data.decode().split("\n\n")[:-1]]
        assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
        return "".join(event["content"] for event in events)


@asynccontextmanager
async def bench_of(url: str, **settings: Any) -> AsyncIterator[Bench]:
    backend = OllamaBackend(OllamaSettings("smollm2", url, dtype="f32", **settings))
    try:
        await backend.start()
        bench = Bench(backend)
        for number, name in enumerate(CHARACTERS):
            item = {"id": number, "name": name, "path": str(demo_adapters()[name])}
            assert await bench.ask("POST", "/internal/adapters", item) == (200, b'{"bytes": 0}')
        yield bench
    finally:
        await backend.stop(0)


async def test_characters_speak_as_in_a_stock_llama_server_and_the_base_as_itself(
    server: OllamaServer, peer: Server
) -> None:
    async with bench_of(server.base_url) as bench:
        said = {name: await bench.text({name: 1.0}) for name in ("bard", "wizard")}  # every projection; rsLoRA
        assert said == {name: alone(peer, {name: 1.0}) for name in said}
        base = await bench.text({})
        assert base == alone(peer, {})
        assert base not in said.values()


async def test_a_set_speaks_as_its_members_applied_separately_and_is_found_after_a_restart(
    server: OllamaServer, peer: Server
) -> None:
    scales = {"pirate": 0.5, "wizard": 0.7}
    async with bench_of(server.base_url) as bench:
        assert await bench.text(scales) == alone(peer, scales)
    before = server.request("GET", "/api/tags")[2]
    async with bench_of(server.base_url) as bench:
        assert await bench.text(scales) == alone(peer, scales)
    assert server.request("GET", "/api/tags")[2] == before, "nothing was made again"


async def test_chats_are_served_whole_and_streamed(server: OllamaServer) -> None:
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8, "temperature": 0, **CONTEXT}
    async with bench_of(server.base_url, alias="smol") as bench:
        status, data = await bench.ask("POST", "/v1/chat/completions", body)
        whole = json.loads(data)
        assert (status, whole["model"], whole["usage"]["completion_tokens"]) == (200, "smol", 8)
        status, data = await bench.ask("POST", "/v1/chat/completions", {**body, "stream": True})
        *chunks, done = [block.removeprefix("data: ") for block in data.decode().split("\n\n")[:-1]]
        deltas = [json.loads(chunk)["choices"][0]["delta"].get("content") or "" for chunk in chunks]
        assert ("".join(deltas), done) == (whole["choices"][0]["message"]["content"], "[DONE]")


async def test_what_ollama_has_nothing_for_is_501_and_bad_input_400(server: OllamaServer) -> None:
    async with bench_of(server.base_url) as bench:
        for method, path, body, status, words in (
            ("POST", "/tokenize", {"content": "a"}, 501, "POST /tokenize is not supported by the Ollama backend"),
            ("GET", "/slots", None, 501, "GET /slots is not supported"),
            ("POST", "/completion", {"prompt": "a", "mirostat": 2}, 501, "Field 'mirostat'"),
            ("POST", "/completion", {"prompt": "a", "lora": [{"id": 9, "scale": 1}]}, 400, "no adapter has the id 9"),
            ("POST", "/completion", {"prompt": "a", "lora": ["pirate"]}, 400, "Field 'lora'"),
            ("POST", "/completion", [1], 400, "must be a JSON object"),
        ):
            found, data = await bench.ask(method, path, body)
            assert (found, words in json.loads(data)["error"]["message"]) == (status, True), data
        assert (await bench.ask("GET", "/health"))[0] == 200
        status, data = await bench.ask("POST", "/v1/embeddings", {"input": ["a", "b"]})
        assert (status, [len(one["embedding"]) for one in json.loads(data)["data"]]) == (200, [576, 576])
        assert json.loads((await bench.ask("GET", "/props"))[1])["model_alias"] == "smollm2"
        assert json.loads((await bench.ask("GET", "/v1/models"))[1])["data"][0]["id"] == "smollm2"


async def test_an_adapter_that_is_forgotten_takes_its_models_with_it(
    server: OllamaServer, client: ollama.AsyncClient
) -> None:

    async def derived() -> int:
        return sum((model.model or "").startswith("loraproxy-") for model in (await client.list()).models)

    async with bench_of(server.base_url) as bench:
        before = await derived()
        await bench.text({"robot": 0.25}, n_predict=1)
        await bench.text({"robot": 0.25, "bard": 0.25}, n_predict=1)
        await bench.text({"bard": 0.25}, n_predict=1)
        number = CHARACTERS.index("robot")
        assert (await bench.ask("DELETE", f"/internal/adapters/{number}"))[0] == 200
        assert await derived() == before + 3, "unloading alone keeps them"
        assert (await bench.ask("DELETE", f"/internal/adapters/{number}/prompts"))[0] == 200
        left = {model.model for model in (await client.list()).models}
        await bench.text({"bard": 0.25}, n_predict=1)
        assert {model.model for model in (await client.list()).models} == left


async def test_a_model_that_the_server_lost_is_made_again_within_the_request(
    server: OllamaServer, client: ollama.AsyncClient
) -> None:
    async with bench_of(server.base_url) as bench:
        said = await bench.text({"bard": 0.9})
        for entry in (await client.list()).models:
            if (entry.model or "").startswith("loraproxy-"):
                await client.delete(entry.model or "")
        assert await bench.text({"bard": 0.9}) == said


async def test_a_server_that_dies_fails_the_stream_with_an_error_event_and_ends_the_worker(
    tmp_path: Path, model: Path, server: OllamaServer
) -> None:
    with running_ollama(tmp_path, {"smollm2": model}) as dying:
        backend = OllamaBackend(
            OllamaSettings("smollm2", dying.base_url), Liveness(interval=0.05, timeout=5, failures=2)
        )
        try:
            await backend.start()
            ended = asyncio.create_task(backend.wait())
            body = {"prompt": PROMPT, "stream": True, "n_predict": 900, "temperature": 0, **CONTEXT}
            async with backend.session.post(f"{backend.base_url}/completion", json=body) as answer:
                await answer.content.readany()
                dying.stop()
                rest = await answer.read()
            assert b'"error":{"code":502,"message":"the Ollama server at' in rest.replace(b'": ', b'":')
            assert "cannot be reached" in (await asyncio.wait_for(ended, 30)).report()
        finally:
            await backend.stop(0)
    again = OllamaBackend(OllamaSettings("smollm2", dying.base_url))
    with pytest.raises(StartFailed, match="cannot be reached"):
        await again.start()
    await again.stop(0)


async def test_a_model_that_the_server_has_not_is_named_at_the_start(server: OllamaServer) -> None:
    backend = OllamaBackend(OllamaSettings("llama9", server.base_url))
    with pytest.raises(StartFailed, match=r"has no model 'llama9'; it has: smollm2:latest"):
        await backend.start()
    await backend.stop(0)


async def test_the_official_client_works_with_the_stand_in(client: ollama.AsyncClient) -> None:
    options = {"temperature": 0, "num_predict": 6, **CONTEXT}
    messages = [{"role": "user", "content": "Hello!"}]
    whole = await client.chat("smollm2", messages, options=options)
    parts = [part async for part in await client.chat("smollm2", messages, options=options, stream=True)]
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert (parts[-1].done_reason, whole.eval_count) == ("length", 6)
    generated = await client.generate("smollm2", "Hello!", options=options)
    assert generated.response == whole.message.content
    assert generated.context
    assert "smollm2:latest" in [model.model for model in (await client.ps()).models]
    shown = await client.show("smollm2")
    assert (shown.modelinfo or {})["general.architecture"] == "llama"
    with pytest.raises(ollama.ResponseError, match="model 'nobody' not found"):
        await client.generate("nobody", "a")
