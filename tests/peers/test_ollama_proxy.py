"""The product in front of the stand-in for Ollama, which runs models by a real llama-server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ollama
import pytest

from loraproxy.tools.convert import convert
from ollama_process import OllamaServer, running_ollama
from proxies import call, run_to_the_end, running_proxy
from servers import PeerUnavailable, Server, demo_adapters, free_port, llama_server_command, running_llama_server

CHAT = {"messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0, "max_tokens": 8}
SET = {"pirate": 0.5, "wizard": 0.7}
CHARACTERS = demo_adapters()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[OllamaServer]:
    try:
        llama_server_command()
    except PeerUnavailable as reason:
        pytest.skip(str(reason))
    with running_ollama(tmp_path_factory.mktemp("ollama"), {"smollm2": model}, "--max-loaded", "4") as running:
        yield running


def in_front_of(url: str, uploads: Path, *more: str) -> list[str]:
    backend = ("--backend", "ollama", "--backend-url", url, "--model", "smollm2")
    return ["serve", *backend, "--upload-dir", str(uploads), *more]


@contextmanager
def proxy_of(folder: Path, server: OllamaServer, *more: str) -> Iterator[Server]:
    with running_proxy(folder, in_front_of(server.base_url, folder / "uploads", *more)) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory, server: OllamaServer) -> Iterator[Server]:
    adapters = [f"--adapter={name}={path}" for name, path in CHARACTERS.items()]
    with proxy_of(tmp_path_factory.mktemp("proxy"), server, *adapters) as running:
        yield running


def chat(proxy: Server, **fields: Any) -> tuple[str, str]:
    """What is said, and the label of what it was said under."""
    status, headers, answer = call(proxy, "POST", "/v1/chat/completions", {**CHAT, **fields})
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"], headers["x-lora"]


def derived(server: OllamaServer) -> set[str]:
    models = json.loads(server.request("GET", "/api/tags")[2])["models"]
    return {model["name"] for model in models if model["name"].startswith("loraproxy-")}


def wait_until_derived(server: OllamaServer, wanted: set[str]) -> None:
    deadline = time.monotonic() + 30
    while (there := derived(server)) != wanted:
        assert time.monotonic() < deadline, there ^ wanted


def test_characters_and_sets_are_served_by_name_through_every_api(proxy: Server, server: OllamaServer) -> None:
    base, label = chat(proxy)
    assert label == ""
    pirate, label = chat(proxy, model="pirate")
    assert (label, pirate != base) == ("pirate=1", True)
    both, label = chat(proxy, lora=SET)
    assert (label, both not in (base, pirate)) == ("pirate=0.5,wizard=0.7", True)
    events = call(proxy, "POST", "/v1/chat/completions", {**CHAT, "lora": SET, "stream": True})[2]
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]) == both
    sampling = {"temperature": 0, "num_predict": 8, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.0}
    with ollama.Client(proxy.base_url) as client:
        assert client.chat("pirate:latest", CHAT["messages"], options=sampling).message.content == pirate
        parts = client.chat("smollm2:pirate", CHAT["messages"], options=sampling, stream=True)
        assert "".join(part.message.content or "" for part in parts) == pirate
        assert {model.model for model in client.list().models} == {
            "smollm2:latest",
            *(f"{name}:latest" for name in CHARACTERS),
        }
        assert client.show("pirate").details is not None
        generated = client.generate("pirate", "Who are you?", options=sampling, keep_alive="1m")
        assert (generated.model, generated.response, bool(generated.context)) == ("pirate", pirate, True)
        with pytest.raises(ollama.ResponseError, match="model 'nobody' not found"):
            client.chat("nobody", CHAT["messages"])
    metrics = call(proxy, "GET", "/metrics")[2].splitlines()
    assert any('endpoint="/api/chat"' in line and 'adapter="pirate"' in line for line in metrics)
    assert len(derived(server)) == 2, "nothing is made for names alone"


def test_what_is_uploaded_is_kept_over_a_restart_and_leaves_with_its_models(
    tmp_path: Path, server: OllamaServer, model: Path
) -> None:
    convert(CHARACTERS["robot"], tmp_path / "robot.gguf", model)
    before = derived(server)
    with proxy_of(tmp_path, server) as proxy:
        status, _, answer = call(proxy, "PUT", "/adapters/clank", (tmp_path / "robot.gguf").read_bytes())
        assert status in (200, 201), answer
        said = chat(proxy, model="clank")
        made = derived(server) - before
        assert len(made) == 1
    with proxy_of(tmp_path, server) as proxy:
        assert chat(proxy, model="clank") == said
        assert derived(server) - before == made, "the model was found again"
    with proxy_of(tmp_path, server) as proxy:
        assert call(proxy, "DELETE", "/adapters/clank")[0] == 200
        wait_until_derived(server, before)
        assert call(proxy, "POST", "/v1/chat/completions", {**CHAT, "lora": "clank"})[0] == 400


def test_ollamas_clients_reach_a_llama_server(tmp_path: Path, model: Path) -> None:
    convert(CHARACTERS["pirate"], tmp_path / "pirate.gguf", model)
    arguments = ["-m", str(model), "-np", "1", "-c", "1024", "-t", "2", "--lora", str(tmp_path / "pirate.gguf")]
    with ExitStack() as stack:
        try:
            behind = stack.enter_context(running_llama_server(tmp_path, [*arguments, "--lora-init-without-apply"]))
        except PeerUnavailable as reason:
            pytest.skip(str(reason))
        at = ["serve", "--backend", "llama-server", "--backend-url", behind.base_url]
        proxy = stack.enter_context(running_proxy(tmp_path, at))
        client = stack.enter_context(ollama.Client(proxy.base_url))
        assert "pirate:latest" in [listed.model for listed in client.list().models]
        sampling = {"temperature": 0, "num_predict": 8, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.0}
        whole = client.chat("pirate", CHAT["messages"], options=sampling)
        parts = client.chat("pirate", CHAT["messages"], options=sampling, stream=True)
        assert "".join(part.message.content or "" for part in parts) == whole.message.content
        assert whole.message.content == chat(proxy, model="pirate")[0] != chat(proxy)[0]


def test_what_ollama_has_nothing_for_is_501(proxy: Server) -> None:
    for method, path, body, words in (
        ("POST", "/tokenize", {"content": "a"}, "POST /tokenize is not supported by the Ollama backend"),
        ("GET", "/slots", None, "GET /slots is not supported"),
        ("POST", "/infill", {}, "POST /infill is not supported"),
        ("POST", "/completion", {"prompt": "a", "mirostat": 2}, "Field 'mirostat'"),
    ):
        status, _, answer = call(proxy, method, path, body)
        assert (status, words in answer["error"]["message"]) == (501, True), answer


def test_texts_are_embedded(proxy: Server) -> None:
    status, _, answer = call(proxy, "POST", "/v1/embeddings", {"input": ["a", "b"]})
    assert (status, [len(one["embedding"]) for one in answer["data"]]) == (200, [576, 576])
    with ollama.Client(proxy.base_url) as client:
        assert len(client.embed("smollm2", "a").embeddings[0]) == 576


def test_an_ollama_that_refuses_adapters_or_is_gone_says_so_and_the_base_is_served(tmp_path: Path, model: Path) -> None:
    try:
        llama_server_command()
    except PeerUnavailable as reason:
        pytest.skip(str(reason))
    adapter = f"--adapter=pirate={CHARACTERS['pirate']}"
    with (
        running_ollama(tmp_path, {"smollm2": model}, "--refuse-adapters") as newer,
        proxy_of(tmp_path, newer, adapter) as proxy,
    ):
        assert chat(proxy)[0]
        status, _, answer = call(proxy, "POST", "/v1/chat/completions", {**CHAT, "model": "pirate"})
        assert status == 501
        assert "this Ollama cannot make models with LoRA adapters" in answer["error"]["message"]
        assert "WARNING this Ollama cannot make models" in (tmp_path / "proxy.log").read_text()
        newer.stop()
        for path in ("/v1/chat/completions", "/api/chat"):
            status, headers, answer = call(proxy, "POST", path, {**CHAT, "model": "smollm2", "stream": False})
            error = answer["error"] if path == "/api/chat" else answer["error"]["message"]
            assert (status, headers["retry-after"], "is it running?" in error) == (503, "2", True)


def test_a_start_that_cannot_work_says_why(server: OllamaServer, proxy: Server, tmp_path: Path) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    for arguments, code, words in (
        (in_front_of(nowhere, tmp_path), 1, f"error: the Ollama server at {nowhere} cannot be reached"),
        (in_front_of(f"{server.base_url}/v1", tmp_path), 1, "give its address alone"),
        (in_front_of("127.0.0.1:11434", tmp_path), 2, "should be a URL such as http://"),
        ([*in_front_of(server.base_url, tmp_path)[:-4], "--model", "llama9"], 1, "it has: smollm2:latest"),
        (["serve", "--backend", "ollama"], 2, "no base model: give --model NAME"),
    ):
        ended = run_to_the_end(*arguments)
        assert (ended.returncode, words in ended.stderr) == (code, True), ended.stderr
