"""Ollama's own client against the product: chats, generations, lists, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from proxies import call
from servers import Server, demo_adapters

OPTIONS = {"temperature": 0, "num_predict": 12, "seed": 1}
MESSAGES = [{"role": "user", "content": "Who are you?"}]
CHARACTERS = tuple(demo_adapters())


@pytest.fixture
def client(product: Server) -> Iterator[ollama.Client]:
    with ollama.Client(product.base_url) as client:
        yield client


def llama_server_says(product: Server, model: str) -> str:
    """The same chat through OpenAI's API, sampled as Ollama does."""
    sampling = {"temperature": 0, "repeat_penalty": 1.1, "repeat_last_n": 64, "max_tokens": 12, "seed": 1}
    status, _, answer = call(
        product, "POST", "/v1/chat/completions", {"messages": MESSAGES, "model": model, **sampling}
    )
    assert status == 200, answer
    text: str = answer["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize("name", ["pirate", "pirate:latest", "smollm2:pirate"])
def test_an_adapter_is_a_model_and_answers_as_it_does_elsewhere(
    product: Server, client: ollama.Client, name: str
) -> None:
    whole = client.chat(name, MESSAGES, options=OPTIONS)
    assert whole.message.content == llama_server_says(product, "pirate")
    assert whole.message.content != llama_server_says(product, "smollm2")
    assert (whole.model, whole.done_reason, whole.eval_count) == (name, "length", 12)


def test_streams_say_the_same(product: Server, client: ollama.Client) -> None:
    for name in ("smollm2:latest", "pirate", "wizard"):
        parts = list(client.chat(name, MESSAGES, options=OPTIONS, stream=True))
        said = "".join(part.message.content or "" for part in parts)
        assert said == llama_server_says(product, name.removesuffix(":latest"))
        assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_a_generation_is_a_chat_of_its_prompt(product: Server, client: ollama.Client) -> None:
    said = llama_server_says(product, "wizard")
    assert client.generate("wizard", "Who are you?", options=OPTIONS).response == said
    parts = client.generate("wizard", "Who are you?", options=OPTIONS, stream=True)
    assert "".join(part.response or "" for part in parts) == said


@pytest.mark.parametrize(
    ("path", "fields", "label"),
    [
        ("/api/chat", {"lora": {"pirate": 0.5, "wizard": 0.7}}, "pirate=0.5,wizard=0.7"),
        ("/api/chat", {"model": "pirate", "lora": "none"}, ""),
        ("/lora/bard/api/chat", {}, "bard=1"),
        ("/lora/bard/api/chat", {"model": "smollm2:none"}, ""),
        ("/lora/bard/api/chat", {"model": "pirate"}, "pirate=1"),
    ],
)
def test_adapters_are_selected_as_everywhere(product: Server, path: str, fields: dict[str, Any], label: str) -> None:
    body = {"model": "smollm2", "messages": MESSAGES, "options": OPTIONS, "stream": False, **fields}
    status, headers, answer = call(product, "POST", path, body)
    assert (status, headers["x-lora"]) == (200, label)
    if label == "bard=1":
        assert answer["message"]["content"] == llama_server_says(product, "bard")
    if not label:
        assert answer["message"]["content"] == llama_server_says(product, "smollm2")


def test_the_lists_have_the_base_and_its_adapters(client: ollama.Client) -> None:
    listed = {model.model: model for model in client.list().models}
    assert listed.keys() == {"smollm2:latest", *(f"{name}:latest" for name in CHARACTERS)}
    assert len({model.digest for model in listed.values()}) == len(listed)
    details = listed["pirate:latest"].details
    assert details is not None
    assert (details.parent_model, details.family, details.quantization_level) == ("smollm2", "llama", "Q4_1")
    assert details.parameter_size == "134.52M"
    client.generate("pirate", "a", options={"num_predict": 1})
    running = {model.model: model for model in client.ps().models}
    assert running.keys() >= {"smollm2:latest", "pirate:latest"}
    assert running["pirate:latest"].context_length == 1024


def test_a_model_is_shown_with_its_template_and_what_the_base_is(client: ollama.Client) -> None:
    base, adapter = client.show("smollm2"), client.show("pirate:latest")
    for shown in (base, adapter):
        assert "<|im_start|>" in (shown.template or "")
        assert shown.modelinfo is not None
        assert shown.modelinfo["general.architecture"] == "llama"
        assert shown.modelinfo["llama.context_length"] == 8192
    assert adapter.details is not None
    assert adapter.details.parent_model == "smollm2"


def test_an_unknown_model_is_ollamas_404(client: ollama.Client) -> None:
    for ask in (
        lambda: client.chat("nobody:latest", MESSAGES),
        lambda: client.generate("smollm2:nobody", "a"),
        lambda: client.show("nobody"),
    ):
        with pytest.raises(ollama.ResponseError, match=r"model '.*nobody.*' not found") as caught:
            ask()
        assert caught.value.status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "/api/chat", {"model": "smollm2", "lora": "nobody", "messages": MESSAGES}, 400, "unknown adapter"),
        ("POST", "/lora/nobody/api/chat", {"model": "smollm2", "messages": MESSAGES}, 400, "unknown adapter"),
        ("GET", "/lora/nobody/api/tags", None, 400, "unknown adapter"),
        ("POST", "/api/generate", {"prompt": "a"}, 400, "model is required"),
        ("POST", "/api/generate", b"{", 400, "not JSON"),
        ("POST", "/api/generate", {"model": "smollm2", "prompt": "a", "images": ["x"]}, 501, "'images'"),
        ("POST", "/api/embed", {"model": "smollm2", "input": "a"}, 501, "not supported"),
        ("POST", "/api/create", {"model": "x"}, 501, "PUT /adapters/NAME"),
        ("POST", "/api/pull", {"model": "x"}, 501, "not supported"),
        ("DELETE", "/api/delete", {"model": "x"}, 501, "not supported"),
        ("POST", "/api/blobs/sha256:0", b"x", 501, "not supported"),
        ("GET", "/api/nothing", None, 404, "File Not Found"),
    ],
)
def test_errors_are_text_as_ollamas_are(
    product: Server, method: str, path: str, body: Any, status: int, words: str
) -> None:
    found, _, answer = call(product, method, path, body)
    assert (found, list(answer)) == (status, ["error"])
    assert words in answer["error"]


def test_requests_are_counted_and_the_server_is_found_alive(product: Server, client: ollama.Client) -> None:
    client.generate("robot", "a", options={"num_predict": 1})
    metrics = call(product, "GET", "/metrics")[2]
    assert any('endpoint="/api/generate"' in line and 'adapter="robot"' in line for line in metrics.splitlines())
    for path in ("/", "/api/tags", "/api/version"):
        assert product.request("HEAD", path)[0] == 200
    assert json.loads(product.request("GET", "/api/version")[2])["version"]
