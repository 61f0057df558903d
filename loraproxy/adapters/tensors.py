"""An adapter in memory, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class Op(str, Enum):
    """The graph operation whose result a pair corrects."""

    MUL_MAT = "mul_mat"
    GET_ROWS = "get_rows"


@dataclass(frozen=True)
class LoraTensor:
    """One low-rank pair: for each token, ``out += adapter_scale * scale * B @ (A @ x)``.

    target: the base tensor's GGUF name, e.g. ``blk.0.attn_q.weight``.
    op: ``MUL_MAT``: ``a`` is (rank, n_in), ``b`` is (n_out, rank), x the input row (n_in,).
        ``GET_ROWS`` (token embeddings): ``a`` is (rank, n_vocab), its column for the token is ``A @ x``;
        ``b`` is (n_embd, rank).
    scale: alpha / rank (or alpha / sqrt(rank) for rsLoRA), without the scale a request asks for.
    """

    target: str
    op: Op
    a: NDArray[np.float32]
    b: NDArray[np.float32]
    scale: float

    @property
    def rank(self) -> int:
        """The inner dimension of the pair."""
        return int(self.a.shape[0])


@dataclass(frozen=True)
class Adapter:
    """One LoRA adapter, read and checked against a base model."""

    name: str
    path: Path
    digest: str
    """Hex SHA-256 of the file content that defines the adapter (weights and config)."""
    source: str
    """``gguf`` or ``peft``."""
    tensors: tuple[LoraTensor, ...]
    notes: tuple[str, ...] = field(default=())
    """What was noticed while reading, e.g. ``rsLoRA: scale = 8 / sqrt(8) = 2.83``."""
