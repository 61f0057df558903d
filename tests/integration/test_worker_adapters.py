"""Adapters that enter and leave a running worker."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.read import survey_adapter
from servers import Server, demo_adapters, running_worker

DEMO = demo_adapters()
PROMPT = "<|im_start|>user\nWhere can I sleep tonight?<|im_end|>\n<|im_start|>assistant\n" + 40 * "Well, "


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Server]:
    """A worker without adapters, whose adapters these tests change."""
    with running_worker(tmp_path_factory.mktemp("worker"), model=model, parallel=2, ctx_size=2048) as server:
        yield server


def call(server: Server, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    status, _, answer = server.request(method, path, None if body is None else json.dumps(body).encode())
    return status, json.loads(answer)


def load(server: Server, adapter_id: int, name: str, **more: Any) -> tuple[int, Any]:
    item = {"id": adapter_id, "name": name, "path": str(DEMO[name]), **more}
    return call(server, "POST", "/internal/adapters", item)


def unload(server: Server, adapter_id: int) -> tuple[int, Any]:
    return call(server, "DELETE", f"/internal/adapters/{adapter_id}")


def complete(server: Server, adapter_id: int, n: int = 16) -> tuple[int, Any]:
    body = {"prompt": PROMPT, "lora": [{"id": adapter_id, "scale": 1.0}], "n_predict": n, "temperature": 0}
    return call(server, "POST", "/completion", {**body, "ignore_eos": True, "return_tokens": True})


def message(answer: tuple[int, Any]) -> str:
    text: str = answer[1]["error"]["message"]
    return text


def test_what_a_survey_says_of_an_adapters_memory_is_what_it_takes(own: Server, model: Path) -> None:
    base = BaseModel.from_gguf(model)
    for number, (name, path) in enumerate(DEMO.items(), start=10):
        summary = survey_adapter(name, path, base)
        assert load(own, number, name, digest=summary.digest) == (200, {"bytes": summary.resident_bytes})
        assert unload(own, number) == (200, {})


def test_an_adapter_is_usable_from_its_load_to_its_unload(own: Server) -> None:
    assert complete(own, 1)[0] == 400
    assert load(own, 1, "pirate")[0] == 200
    assert [adapter["id"] for adapter in call(own, "GET", "/lora-adapters")[1]] == [1]
    status, answer = complete(own, 1)
    assert status == 200
    assert load(own, 1, "bard") == (400, {"error": {**_error(400), "message": "adapter id 1 is taken"}})
    assert complete(own, 1)[1]["tokens"] == answer["tokens"]
    assert unload(own, 1)[0] == 200
    assert complete(own, 1)[0] == 400
    assert message(unload(own, 1)) == "adapter 1 is not loaded"


def test_what_the_prompt_cache_has_of_an_adapter_is_right_when_it_comes_back(own: Server) -> None:
    load(own, 2, "pirate")
    first = complete(own, 2)[1]
    unload(own, 2)
    load(own, 2, "pirate")
    again = complete(own, 2)[1]
    assert again["tokens"] == first["tokens"]
    assert again["timings"]["cache_n"] > 0
    assert call(own, "DELETE", "/internal/adapters/2/prompts")[0] == 200
    assert complete(own, 2)[1]["timings"]["cache_n"] == 0
    unload(own, 2)


def test_an_adapter_leaves_when_its_last_request_has_ended_and_takes_no_new_one(own: Server) -> None:
    load(own, 3, "pirate")
    connection = own.connection()
    body = {"prompt": "Once", "lora": [{"id": 3, "scale": 1.0}], "n_predict": 400, "ignore_eos": True, "stream": True}
    connection.request("POST", "/completion", json.dumps(body))
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    left: list[tuple[int, Any]] = []
    leaving = threading.Thread(target=lambda: left.append(unload(own, 3)))
    leaving.start()
    while complete(own, 3, n=1)[0] == 200:
        pass
    assert not left, "a request runs under it"
    assert response.readline() is not None
    response.close()
    connection.close()  # which cancels the request
    leaving.join(60)
    assert left == [(200, {})]
    assert load(own, 3, "pirate")[0] == 200
    assert unload(own, 3)[0] == 200


def test_what_cannot_be_loaded_says_why_and_leaves_nothing(own: Server, tmp_path: Path) -> None:
    changed = load(own, 4, "pirate", digest="0" * 64)
    assert changed[0] == 409
    assert changed[1]["error"]["type"] == "adapter_changed_error"
    missing = call(own, "POST", "/internal/adapters", {"id": 4, "name": "x", "path": str(tmp_path / "x.gguf")})
    assert missing[0] == 400
    assert str(tmp_path / "x.gguf") in message(missing)
    for item in ({}, {"id": -1, "name": "x", "path": "x"}, {"id": 4, "name": "x", "path": "x", "more": 1}):
        assert call(own, "POST", "/internal/adapters", item)[0] == 400
    assert load(own, 4, "pirate")[0] == 200
    assert unload(own, 4)[0] == 200


def _error(code: int) -> dict[str, Any]:
    return {"code": code, "type": "invalid_request_error"}
