"""The base model of most tests that read adapters."""

from __future__ import annotations

import pytest

from gguf_tools import make_tiny_llama
from loraproxy.adapters.base_model import BaseModel


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    """A random llama of two layers, whose embedding is also its head."""
    return BaseModel.from_gguf(make_tiny_llama(tmp_path_factory.mktemp("base") / "tiny.gguf"))
