"""The prompt cache never carries one adapter's cells into another's request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servers import Server, demo_adapters, running_worker

NAMES = list(demo_adapters())
PROMPT = (
    "<|im_start|>system\n"
    + "The town of Rivergate has a market, a smithy run by Old Marta, an inn called the Golden Goose and a dark well. "
    * 8
    + "<|im_end|>\n<|im_start|>user\nWhere can I sleep tonight?<|im_end|>\n<|im_start|>assistant\n"
)


def ask(worker: Server, lora: list[dict[str, Any]], *, cache_prompt: bool = True) -> tuple[Any, int]:
    """The answer to PROMPT, and how many of its tokens came from the cache."""
    body = {
        "prompt": PROMPT,
        "lora": lora,
        "cache_prompt": cache_prompt,
        "n_predict": 8,
        "temperature": 0,
        "n_probs": 2,
    }
    status, _, data = worker.request("POST", "/completion", json.dumps(body).encode())
    answer = json.loads(data)
    assert status == 200, answer
    return (answer["content"], json.dumps(answer["completion_probabilities"])), answer["timings"]["cache_n"]


def only(name: str, scale: float = 1.0) -> list[dict[str, Any]]:
    return [{"id": NAMES.index(name), "scale": scale}]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Server]:
    """A worker of these tests' own with the four characters."""
    adapters = [{"id": i, "name": name, "path": demo_adapters()[name]} for i, name in enumerate(NAMES)]
    with running_worker(tmp_path_factory.mktemp("worker"), model=model, adapters=adapters, threads=2) as server:
        yield server


def test_the_same_prompt_under_another_adapter_equals_that_adapter_alone(worker: Server) -> None:
    alone, _ = ask(worker, only("bard"), cache_prompt=False)
    first, _ = ask(worker, only("pirate"))
    under_another, cached = ask(worker, only("bard"))
    assert under_another == alone
    assert under_another != first
    assert cached == 0
    again, cached = ask(worker, only("bard"))
    assert cached > 0
    assert again == alone


def test_another_scale_of_the_same_adapter_and_the_base_do_not_share_cells(worker: Server) -> None:
    full, _ = ask(worker, only("pirate"))
    for lora in (only("pirate", 0.5), [], [*only("pirate"), *only("robot")]):
        without_cache, _ = ask(worker, lora, cache_prompt=False)
        answer, cached = ask(worker, lora)
        assert (answer, cached) == (without_cache, 0)
        again, cached = ask(worker, lora)
        assert again == without_cache
        assert cached > 0
    again, cached = ask(worker, only("pirate"))
    assert again == full
    assert cached > 0
