"""Random adapters: as expensive as trained ones of the same rank, and written as files that both servers load."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.gguf_write import write_gguf_adapter
from loraproxy.adapters.tensors import Adapter, LoraTensor, Op
from loraproxy.errors import InvalidRequest

PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
RANK = 16
_DELTA = 0.02
"""How large B A x is beside x: enough to change the text, not enough to break it."""


def random_adapter(base: BaseModel, name: str, seed: int) -> Adapter:
    """An adapter of rank 16 on all seven projections of every layer. Raises InvalidRequest if the model lacks them."""
    random = np.random.default_rng(seed)
    tensors = []
    for layer in range(base.n_layer):
        for projection in PROJECTIONS:
            target = f"blk.{layer}.{projection}.weight"
            shape = base.shape_of(target)
            if shape is None or len(shape) != 2:
                raise InvalidRequest(f"{base.describe()} has no matrix {target}: the benchmark cannot adapt it")
            n_out, n_in = shape
            a = random.normal(0, n_in**-0.5, (RANK, n_in)).astype(np.float32)
            b = random.normal(0, _DELTA * RANK**-0.5, (n_out, RANK)).astype(np.float32)
            tensors.append(LoraTensor(target, Op.MUL_MAT, a, b, 1.0, base.is_quantised(target)))
    return Adapter(name, Path(f"{name}.gguf"), "", "gguf", tuple(tensors))


def write_random_adapters(base: BaseModel, folder: Path, count: int) -> list[Path]:
    """``count`` adapters in f16 as GGUF files in ``folder``."""
    paths = [folder / f"adapter-{i}.gguf" for i in range(count)]
    for i, path in enumerate(paths):
        write_gguf_adapter(random_adapter(base, path.stem, seed=i), base, path, "f16")
    return paths


def kept_bytes(base: BaseModel, count: int) -> int:
    """Bytes that the engine holds for ``count`` such adapters."""
    return count * random_adapter(base, "sized", seed=0).summary.resident_bytes
