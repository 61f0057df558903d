"""Base weights with adapters added to them, a few rows at a time."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from mmap import mmap

import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from loraproxy.adapters.gguf_header import GgufTensor
from loraproxy.adapters.tensors import Adapter, LoraTensor, Op
from loraproxy.errors import CommandFailed
from loraproxy.tools.ggml import decode_rows, encode_rows, row_bytes
from loraproxy.tools.gguf_copy import Bytes, NewTensor
from loraproxy.tools.grids import GRIDS
from loraproxy.tools.rounding import Feedback, add_on_grid

_CHUNK_VALUES = 1 << 20
_MAX_THREADS = 16
"""Each takes up to 50 MB."""


@dataclass
class Rounding:
    """How much of what the adapters add is still there in the weights as written.

    moved: the sum of (written - base) * delta; delta: that of delta². Their ratio is what is left of the adapters
    on the inputs that they react to.
    """

    moved: float = 0.0
    delta: float = 0.0

    @property
    def kept(self) -> float:
        """1 where everything arrived, near 0 where rounding gave the base's weights back."""
        return self.moved / self.delta if self.delta else 1.0


@dataclass(frozen=True)
class Delta:
    """What the adapters add to one tensor: pairs, each with its adapter's scale."""

    pairs: list[tuple[float, LoraTensor]] = field(default_factory=list)

    def rows(self, first: int, last: int) -> NDArray[np.float32]:
        """Rows ``first`` to ``last`` of the sum of ``scale * B @ A``, as they lie in the tensor: (last - first, n)."""
        terms = [_rows(pair, first, last) * np.float32(scale * pair.scale) for scale, pair in self.pairs]
        total: NDArray[np.float32] = terms[0]
        for term in terms[1:]:
            total += term
        return total

    def of_expert(self, number: int) -> Delta:
        """What is added to one expert's matrix, where the pairs are those of experts."""
        return Delta([(scale, replace(pair, a=pair.a[number], b=pair.b[number])) for scale, pair in self.pairs])

    def feedback(self) -> Feedback:
        """How to round sums with it; every row of it is a combination of these directions."""
        return Feedback(np.vstack([pair.b.T if pair.op is Op.GET_ROWS else pair.a for _, pair in self.pairs]))


def _rows(pair: LoraTensor, first: int, last: int) -> NDArray[np.float32]:
    if pair.op is Op.GET_ROWS:
        # row t of the embedding is what the lookup of token t gives: B @ A[:, t]
        found: NDArray[np.float32] = np.matmul(pair.a[:, first:last].T, pair.b.T)
    else:
        found = np.matmul(pair.b[first:last], pair.a)
    return found


def deltas_of(adapters: Iterable[tuple[float, Adapter]]) -> dict[str, Delta]:
    """Target name to what all adapters at their scales add to it."""
    deltas: dict[str, Delta] = {}
    for scale, adapter in adapters:
        for pair in adapter.tensors:
            deltas.setdefault(pair.target, Delta()).pairs.append((scale, pair))
    return deltas


def merged(
    source: mmap,
    tensor: GgufTensor,
    delta: Delta,
    kind: GGMLQuantizationType,
    rounding: Rounding,
    name: str | None = None,
) -> NewTensor:
    """``tensor`` of the file ``source`` plus ``delta``, as ``kind``. Adds what became of it to ``rounding``.

    Where ``kind`` is the tensor's own and its blocks are coarse, the blocks keep their scales. Experts, which lie one
    after the other, are matrices of their own.

    Its data raises CommandFailed where a sum is not a number that ``kind`` can hold.
    """
    name = name or tensor.name

    def data() -> Iterator[Bytes]:
        for matrix, added in _matrices(tensor, delta):
            yield from _merged_matrix(source, matrix, added, kind, rounding, name)

    return NewTensor(name, tensor.shape, kind, data)


def _matrices(tensor: GgufTensor, delta: Delta) -> Iterator[tuple[GgufTensor, Delta]]:
    """The tensor, or each expert's part of it as a tensor, and what is added to it."""
    if len(tensor.shape) == 2:
        yield tensor, delta
        return
    n_expert, *matrix = tensor.shape
    size = tensor.n_bytes // n_expert
    for number in range(n_expert):
        part = replace(tensor, shape=tuple(matrix), offset=tensor.offset + number * size, n_bytes=size)
        yield part, delta.of_expert(number)


def _merged_matrix(
    source: mmap, tensor: GgufTensor, delta: Delta, kind: GGMLQuantizationType, rounding: Rounding, name: str
) -> Iterator[Bytes]:
    n_rows, n_columns = tensor.shape
    step = max(1, _CHUNK_VALUES // n_columns)
    stored = row_bytes(tensor.type, n_columns)
    grid = GRIDS.get(kind) if kind is tensor.type else None
    feedback = lru_cache(delta.feedback)

    def chunk(first: int) -> tuple[Bytes, float, float]:
        last = min(first + step, n_rows)
        raw = np.frombuffer(source[tensor.offset + first * stored : tensor.offset + last * stored], np.uint8)
        with np.errstate(all="ignore"):  # what is no number is refused next
            added = delta.rows(first, last)
            old = decode_rows(raw, tensor.type, n_columns)
            sums = old + added
        _check_finite(sums, name, kind)
        written = encode_rows(sums, kind) if grid is None else add_on_grid(grid, raw, added, feedback())
        moved = decode_rows(written, kind, n_columns) - old
        return written.data, _dot(moved, added), _dot(added, added)

    for written, moved, added in _in_order(chunk, range(0, n_rows, step)):
        rounding.moved += moved
        rounding.delta += added
        yield written


def look_up(source: mmap, tensor: GgufTensor, delta: Delta, other: mmap, written: GgufTensor) -> Rounding:
    """What became of ``delta``, added to ``tensor`` of the file ``source``, in the tensor that ``other`` has of it."""
    found = Rounding()
    for (old, added), (new, _) in zip(_matrices(tensor, delta), _matrices(written, delta), strict=True):
        _look_up_matrix(source, old, added, other, new, found)
    return found


def _look_up_matrix(
    source: mmap, tensor: GgufTensor, delta: Delta, other: mmap, written: GgufTensor, found: Rounding
) -> None:
    n_rows, n_columns = tensor.shape
    step = max(1, _CHUNK_VALUES // n_columns)

    def values(file: mmap, lies: GgufTensor, first: int, last: int) -> NDArray[np.float32]:
        size = row_bytes(lies.type, n_columns)
        raw = np.frombuffer(file[lies.offset + first * size : lies.offset + last * size], np.uint8)
        return decode_rows(raw, lies.type, n_columns)

    for first in range(0, n_rows, step):
        last = min(first + step, n_rows)
        added = delta.rows(first, last)
        found.moved += _dot(values(other, written, first, last) - values(source, tensor, first, last), added)
        found.delta += _dot(added, added)


def _dot(left: NDArray[np.float32], right: NDArray[np.float32]) -> float:
    return float(left.ravel() @ right.ravel())


def _check_finite(values: NDArray[np.float32], name: str, kind: GGMLQuantizationType) -> None:
    largest = float(np.abs(values).max())
    if not np.isfinite(largest):
        raise CommandFailed(f"tensor {name}: the merged weights are no finite numbers; is the base model damaged?")
    if kind is GGMLQuantizationType.F16 and largest > float(np.finfo(np.float16).max):
        raise CommandFailed(f"tensor {name}: the merged weights are too large for F16; give --type BF16 or F32")


def _in_order(
    work: Callable[[int], tuple[Bytes, float, float]], items: Iterable[int]
) -> Iterator[tuple[Bytes, float, float]]:
    """``work`` for each item, on all CPUs, a few ahead of what is taken; ggml's and numpy's loops free the GIL."""
    n_threads = min(os.cpu_count() or 1, _MAX_THREADS)
    ahead: deque[Future[tuple[Bytes, float, float]]] = deque()
    with ThreadPoolExecutor(n_threads) as executor:
        try:
            for item in items:
                ahead.append(executor.submit(work, item))
                if len(ahead) > n_threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()
