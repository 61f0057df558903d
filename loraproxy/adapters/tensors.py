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
    op: ``MUL_MAT``: ``a`` is (rank, n_in), ``b`` is (n_out, rank), x the input row (n_in,). Of a mixture of experts
        every expert has a pair of its own: ``a`` is (n_expert, rank, n_in), ``b`` is (n_expert, n_out, rank).
        ``GET_ROWS`` (token embeddings): ``a`` is (rank, n_vocab), its column for the token is ``A @ x``;
        ``b`` is (n_embd, rank).
    scale: alpha / rank (or alpha / sqrt(rank) for rsLoRA), without the scale a request asks for.
    eight_bits: the base's weight is quantised, so that the engine keeps the pair in 8 bits, unless told otherwise.
    """

    target: str
    op: Op
    a: NDArray[np.float32]
    b: NDArray[np.float32]
    scale: float
    eight_bits: bool = False

    @property
    def rank(self) -> int:
        """The inner dimension of the pair."""
        return int(self.b.shape[-1])

    @property
    def n_expert(self) -> int:
        """How many experts have a pair here; 0 for a plain weight."""
        return int(self.a.shape[0]) if self.a.ndim == 3 else 0


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
    left_out: tuple[str, ...] = field(default=())
    """What was not applied because it is unsupported, a sentence each with the tensors; see Unsupported.LEAVE_OUT."""
    invocation_tokens: tuple[int, ...] = field(default=())
    """An activated LoRA's (aLoRA's) invocation sequence; empty for a plain LoRA."""
    base_name: str = ""
    """The base model that the files say the adapter was trained for; "" if they do not say."""
    size_bytes: int = 0
    """Size of its files on disk."""

    @property
    def summary(self) -> AdapterSummary:
        """What :func:`loraproxy.adapters.read.survey_adapter` says of the same files."""
        ranks = [tensor.rank for tensor in self.tensors]
        scales = [tensor.scale for tensor in self.tensors]
        return AdapterSummary(
            name=self.name,
            path=self.path,
            digest=self.digest,
            format=self.source,
            size_bytes=self.size_bytes,
            rank=(min(ranks), max(ranks)),
            scale=(min(scales), max(scales)),
            targets=tuple(tensor.target for tensor in self.tensors),
            resident_bytes=sum(
                pair_resident_bytes(
                    tensor.rank,
                    tensor.a.shape[-1],
                    tensor.b.shape[-2],
                    tensor.op,
                    n_expert=tensor.n_expert,
                    eight_bits=tensor.eight_bits,
                )
                for tensor in self.tensors
            ),
            notes=self.notes,
            left_out=self.left_out,
            invocation_tokens=self.invocation_tokens,
            base_name=self.base_name,
            needs_graph=any(tensor.n_expert for tensor in self.tensors),
        )


@dataclass(frozen=True)
class AdapterSummary:
    """What can be said of an adapter without its weights.

    format: ``gguf`` or ``peft``. size_bytes: of its files on disk. rank, scale: the smallest and the largest of its
    pairs, before any scale that a request asks for. targets: GGUF names of the base tensors, in graph order, one for
    each pair. resident_bytes: what it will take in the engine's memory. The rest: as in :class:`Adapter`.
    """

    name: str
    path: Path
    digest: str
    format: str
    size_bytes: int
    rank: tuple[int, int]
    targets: tuple[str, ...]
    resident_bytes: int
    scale: tuple[float, float] = (1.0, 1.0)
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    invocation_tokens: tuple[int, ...] = ()
    base_name: str = ""
    needs_graph: bool = False
    """It targets experts, which only llama.cpp's own LoRA graph reaches: it needs a keyed worker."""

    @property
    def n_pairs(self) -> int:
        """How many pairs of A and B there are."""
        return len(self.targets)


def pair_resident_bytes(
    rank: int, n_in: int, n_out: int, op: Op = Op.MUL_MAT, *, n_expert: int = 0, eight_bits: bool = False
) -> int:
    """Bytes that the engine holds for one pair: f16 values in its kernels' tiles, each half in whole 128 bytes.

    Shapes as in :class:`LoraTensor`; the tiles are those of native/kernels.h. Experts' pairs lie as f16 matrices.
    In 8 bits there is a float for each rank beside them; a pair that would suffer takes f16 all the same.
    """
    if n_expert:
        return 2 * n_expert * rank * (n_in + n_out)
    b = rank * _whole(n_out, 32)
    if op is Op.GET_ROWS:
        return _whole(2 * rank * n_in, 128) + _whole(2 * b, 128)
    a = _whole(rank, 4) * _whole(n_in, 16)
    if eight_bits:
        return _whole(a, 128) + _whole(b, 128) + _whole(4 * _whole(rank, 4), 128)
    return _whole(2 * a, 128) + _whole(2 * b, 128)


def _whole(values: int, block: int) -> int:
    return -(-values // block) * block
