"""One product for all tests that only ask it things."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import pytest

from proxies import character_arguments, running_proxy
from servers import Server


@pytest.fixture(scope="session")
def product(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Server]:
    """``loraproxy serve`` with SmolLM2 and the four characters, 4 slots of 1024 tokens."""
    with running_proxy(tmp_path_factory.mktemp("product"), character_arguments()) as server:
        yield server


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
