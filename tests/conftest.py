"""Processes that several tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from servers import PeerUnavailable, Server, base_model, running_llama_server, running_worker


@pytest.fixture(scope="session")
def model() -> Path:
    """The base model's file."""
    try:
        return base_model()
    except PeerUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def worker(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Server]:
    """An embedded worker without adapters."""
    with running_worker(tmp_path_factory.mktemp("worker"), model=model, alias="smollm2") as server:
        yield server


@pytest.fixture(scope="session")
def llama_server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Server]:
    """A real llama-server with the same model, slots and context as ``worker``."""
    arguments = ["-m", str(model), "--alias", "smollm2", "-np", "4", "-c", "2048", "-t", "1", "--metrics", "--slots"]
    try:
        with running_llama_server(tmp_path_factory.mktemp("llama-server"), arguments) as server:
            yield server
    except PeerUnavailable as reason:
        pytest.skip(str(reason))
