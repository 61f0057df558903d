"""Processes that several tests share."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import llama_cpp
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
def f32_base(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Path]:
    """SmolLM2 in F32, made by llama.cpp's quantiser from the packaged file. 540 MB, removed at the end."""
    path = tmp_path_factory.mktemp("f32") / "smollm2-f32.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_ALL_F32
    params.allow_requantize = True
    params.nthread = 2
    assert llama_cpp.llama_model_quantize(str(model).encode(), str(path).encode(), ctypes.byref(params)) == 0
    yield path
    path.unlink()


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
