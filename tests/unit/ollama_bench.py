"""A tiny model and adapters for it, and a stand-in for Ollama that has the model."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np

from gguf_tools import make_gguf_adapter, make_tiny_llama
from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.read import read_adapter
from loraproxy.backends.ollama_api import OllamaClient, new_session
from loraproxy.backends.ollama_models import Member
from ollama_process import OllamaServer, running_ollama

TINY = "tiny"


def tiny_base(folder: Path) -> BaseModel:
    """A random model with a head of its own."""
    return BaseModel.from_gguf(make_tiny_llama(folder / "tiny.gguf", tied=False))


def tiny_adapter(folder: Path, name: str, seed: int) -> Path:
    """A random adapter of one tensor for it."""
    random = np.random.default_rng(seed)
    target = "blk.0.attn_v.weight"
    pair = {"lora_a": random.normal(0, 1, (4, 64)), "lora_b": random.normal(0, 1, (32, 4))}
    tensors = {f"{target}.{half}": values.astype(np.float32) for half, values in pair.items()}
    return make_gguf_adapter(folder / f"{name}.gguf", tensors)


def member(path: Path, base: BaseModel, scale: float = 1.0) -> Member:
    """The adapter at ``path`` at ``scale``."""
    return Member(path.stem, path, read_adapter(path.stem, path, base).digest, scale)


def digest_of(path: Path) -> str:
    """As Ollama writes digests."""
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


@contextmanager
def tiny_ollama(folder: Path, base: BaseModel, *arguments: str) -> Iterator[OllamaServer]:
    """A stand-in that has the model as ``tiny``."""
    folder.mkdir(exist_ok=True)
    with running_ollama(folder, {TINY: base.path}, *arguments) as server:
        yield server


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[OllamaClient]:
    """A client with a session of its own."""
    async with new_session() as session:
        yield OllamaClient(session, url)
