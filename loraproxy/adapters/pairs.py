"""From stored tensors to pairs: which halves, rows and scales make up the pair of each base tensor.

A plan needs headers alone; the values are decoded from it later, or never.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.checks import (
    MAX_FILE_BYTES,
    Refused,
    WeightShape,
    check_rank,
    check_scale,
    check_shapes,
    in_graph_order,
    multiplied,
    op_for,
    weight_of,
)
from loraproxy.adapters.decode import Buffer, all_finite, decode
from loraproxy.adapters.files import release
from loraproxy.adapters.stored import StoredTensor
from loraproxy.adapters.tensors import LoraTensor, Op, pair_resident_bytes


@dataclass(frozen=True)
class Rows:
    """Rows ``source`` to ``source + n_rows`` of a module's output, which lie at ``at`` in a base tensor.

    heads: within each of so many heads, GGUF interleaves the two halves of the rows; 0 leaves them as they are.
    """

    source: int
    at: int
    n_rows: int
    heads: int = 0


@dataclass(frozen=True)
class Place:
    """Where the output of a module lies in the base model."""

    target: str
    rows: tuple[Rows, ...]
    expert: int | None = None
    """Which expert's of a mixture; None: a plain weight."""


@dataclass(frozen=True)
class Part:
    """One module's share of the pair of a base tensor.

    a: (rank, n_in), or (n_in, rank) if a_by_token. b: (n_out, rank), where n_out counts all rows of the module's
    output, of which ``rows`` belong to this base tensor. expert: whose pair it is; None: a plain weight's, or those of
    all experts, which both have in front then.
    """

    module: str
    a: StoredTensor
    b: StoredTensor
    scale: float
    rows: tuple[Rows, ...]
    n_out: int
    a_by_token: bool = False
    expert: int | None = None

    @property
    def rank(self) -> int:
        """The inner dimension of A and B."""
        return self.b.shape[-1]


@dataclass(frozen=True)
class PlannedPair:
    """The pair of one base tensor: A of its parts one below the other, B of its parts side by side."""

    target: str
    op: Op
    n_out: int
    n_in: int
    parts: tuple[Part, ...]
    n_expert: int = 0
    """Experts with a pair of their own; 0: one pair."""
    eight_bits: bool = False
    """As in LoraTensor."""

    @cached_property
    def rank(self) -> int:
        """The inner dimension, summed over the parts; experts' pairs do not add up."""
        ranks = [part.rank for part in self.parts]
        return max(ranks) if self.n_expert else sum(ranks)

    @property
    def by_expert(self) -> bool:
        """Whether every part is the pair of one expert."""
        return any(part.expert is not None for part in self.parts)

    @cached_property
    def scale(self) -> float:
        """What its parts have in common, or 1 where they differ, so that each part's goes into its share of B."""
        scales = {part.scale for part in self.parts}
        return scales.pop() if len(scales) == 1 else 1.0

    @property
    def resident_bytes(self) -> int:
        """Bytes that the engine will hold for it."""
        return pair_resident_bytes(
            self.rank, self.n_in, self.n_out, self.op, n_expert=self.n_expert, eight_bits=self.eight_bits
        )


@dataclass(frozen=True)
class AdapterPlan:
    """An adapter but for its values; the fields are those of :class:`loraproxy.adapters.tensors.Adapter`."""

    pairs: tuple[PlannedPair, ...]
    notes: tuple[str, ...]
    left_out: tuple[str, ...]
    invocation_tokens: tuple[int, ...]
    base_name: str


def plan_pairs(base: BaseModel, parts: Iterable[tuple[str, Part]]) -> tuple[PlannedPair, ...]:
    """The pairs of (target, part) entries, in graph order. Raises Refused where shapes do not fit ``base``."""
    by_target: dict[str, list[Part]] = {}
    for target, part in parts:
        by_target.setdefault(target, []).append(part)
    pairs = in_graph_order([_plan_pair(base, target, shares) for target, shares in by_target.items()])
    if sum(max(pair.n_expert, 1) * pair.rank * (pair.n_in + pair.n_out) for pair in pairs) * 4 > MAX_FILE_BYTES:
        raise Refused(f"the weights take more than {MAX_FILE_BYTES >> 30} GiB as float32")
    return pairs


def _plan_pair(base: BaseModel, target: str, parts: list[Part]) -> PlannedPair:
    op = op_for(target)
    weight = multiplied(weight_of(base, target), op)
    n_out, n_in, n_expert = weight
    for part in parts:
        a = part.a.shape[::-1] if part.a_by_token else part.a.shape
        whole = weight if part.expert is None else WeightShape(n_out, n_in)
        check_shapes(
            base, target if part.n_out == n_out else part.module, a, part.b.shape, whole._replace(n_out=part.n_out)
        )
        check_scale(target, part.scale)
    pair = PlannedPair(target, op, n_out, n_in, tuple(parts), n_expert, base.is_quantised(target))
    if len(parts) > 1:
        check_rank(target, pair.rank)
        _check_apart(pair)
    return pair


def _check_apart(pair: PlannedPair) -> None:
    taken = sorted(
        (part.expert or 0, rows.at, rows.at + rows.n_rows, part.module) for part in pair.parts for rows in part.rows
    )
    for (one, _, end, first), (other, begin, _, second) in itertools.pairwise(taken):
        if one == other and begin < end:
            raise Refused(f"modules {first} and {second} are both tensor {pair.target}")


def decode_pairs(data: Buffer, pairs: Iterable[PlannedPair]) -> tuple[LoraTensor, ...]:
    """The pairs with their values, from the content of the file. Raises Refused for NaN and infinite weights."""
    decoder = _Decoder(data)
    return tuple(decoder.pair(pair) for pair in pairs)


def decode_in_turn(data: Buffer, pairs: Iterable[PlannedPair]) -> Iterator[LoraTensor]:
    """As :func:`decode_pairs`, one pair after the other, whose values are there until the next is asked for.

    What was decoded leaves ``data``.
    """
    ordered = list(pairs)
    uses = Counter(tensor.name for pair in ordered for part in pair.parts for tensor in (part.a, part.b))
    decoder = _Decoder(data)
    for pair in ordered:
        yield decoder.pair(pair)
        for part in pair.parts:
            for tensor in (part.a, part.b):
                uses[tensor.name] -= 1
                if not uses[tensor.name]:
                    decoder.forget(tensor)


class _Decoder:
    """Decodes and checks each stored tensor once, however many pairs share it."""

    def __init__(self, data: Buffer) -> None:
        self._data = data
        self._decoded: dict[str, NDArray[np.float32]] = {}

    def forget(self, tensor: StoredTensor) -> None:
        """No pair that is still to come has it."""
        self._decoded.pop(tensor.name, None)
        release(self._data, tensor.offset, tensor.n_bytes)

    def pair(self, pair: PlannedPair) -> LoraTensor:
        scale = pair.scale
        if pair.by_expert:
            return self._experts(pair)
        if len(pair.parts) == 1:
            (part,) = pair.parts
            return LoraTensor(pair.target, pair.op, self._a(pair, part), self._b(pair, part), scale, pair.eight_bits)
        a = np.concatenate([self._a(pair, part) for part in pair.parts])
        b = np.zeros((pair.n_out, pair.rank), np.float32)
        column = 0
        for part in pair.parts:
            factor = np.float32(1 if part.scale == scale else part.scale)
            values = self._values(pair.target, part.b)
            for rows in part.rows:
                with np.errstate(over="ignore"):  # what overflows is refused below
                    b[rows.at : rows.at + rows.n_rows, column : column + part.rank] = _taken(values, rows) * factor
            column += part.rank
        _check_finite(pair, b)
        return LoraTensor(pair.target, pair.op, a, b, scale, pair.eight_bits)

    def _experts(self, pair: PlannedPair) -> LoraTensor:
        """Every expert's pair; zeros where an expert has none, or one of a smaller rank."""
        a = np.zeros((pair.n_expert, pair.rank, pair.n_in), np.float32)
        b = np.zeros((pair.n_expert, pair.n_out, pair.rank), np.float32)
        for part in pair.parts:
            factor = np.float32(1 if part.scale == pair.scale else part.scale)
            a[part.expert, : part.rank] = self._values(pair.target, part.a)
            with np.errstate(over="ignore"):  # what overflows is refused below
                b[part.expert, :, : part.rank] = self._values(pair.target, part.b) * factor
        _check_finite(pair, b)
        return LoraTensor(pair.target, pair.op, a, b, pair.scale, pair.eight_bits)

    def _a(self, pair: PlannedPair, part: Part) -> NDArray[np.float32]:
        values = self._values(pair.target, part.a)
        return np.ascontiguousarray(values.T) if part.a_by_token else values

    def _b(self, pair: PlannedPair, part: Part) -> NDArray[np.float32]:
        values = self._values(pair.target, part.b)
        if pair.n_expert:  # experts' pairs are whole
            return values
        if len(part.rows) == 1 and part.rows[0].n_rows == pair.n_out:
            return _taken(values, part.rows[0])
        b = np.zeros((pair.n_out, part.rank), np.float32)
        for rows in part.rows:
            b[rows.at : rows.at + rows.n_rows] = _taken(values, rows)
        return b

    def _values(self, target: str, tensor: StoredTensor) -> NDArray[np.float32]:
        values = self._decoded.get(tensor.name)
        if values is None:
            values = self._decoded[tensor.name] = decode(self._data, tensor)
            if not all_finite(values):
                raise Refused(f"tensor {target} holds NaN or infinite weights; the adapter is damaged")
        return values


def _check_finite(pair: PlannedPair, b: NDArray[np.float32]) -> None:
    if not all_finite(b):
        raise Refused(f"tensor {pair.target}: its weights times alpha over rank are too large for float32")


def graph_notes(pairs: Iterable[PlannedPair]) -> list[str]:
    """What an adapter's notes say where only llama.cpp's own LoRA graph can apply it."""
    if not any(pair.n_expert for pair in pairs):
        return []
    return ["targets experts: needs a worker that runs one adapter set at a time (--lora-mode graph)"]


def _taken(b: NDArray[np.float32], rows: Rows) -> NDArray[np.float32]:
    """The rows that a base tensor takes of ``b`` (n, rank), in the order that the GGUF base has.

    Interleaving the halves of each head: LlamaModel.permute of llama.cpp's conversion scripts.
    """
    taken = b[rows.source : rows.source + rows.n_rows]
    if not rows.heads:
        return taken
    half = rows.n_rows // rows.heads // 2
    heads = taken.reshape(rows.heads, 2, half, b.shape[1]).swapaxes(1, 2)
    return np.ascontiguousarray(heads).reshape(rows.n_rows, b.shape[1])
