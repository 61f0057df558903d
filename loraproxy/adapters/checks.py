"""What every adapter must satisfy, whatever file it came from."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from loraproxy.adapters.base_model import OUTPUT, TOKEN_EMBD, BaseModel
from loraproxy.adapters.tensors import LoraTensor, Op

MAX_RANK = 1024
MAX_FILE_BYTES = 8 << 30
"""An adapter file larger than this is refused before it is read."""
MAX_PAIRS = 32 * 1024
MAX_NAME = 256
"""Characters in the name of an adapter's tensor."""

_SHOWN = 4
_EXPERTS = re.compile(r"blk\.\d+\.ffn_(gate|up|down|gate_up)_exps\.weight")
"""What llama.cpp's ``build_moe_ffn`` multiplies with ``build_lora_mm_id`` (src/llama-graph.cpp)."""
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class Refused(ValueError):
    """Why an adapter cannot be applied; :func:`loraproxy.adapters.read.read_adapter` adds its name and path."""


def listed(names: Iterable[str]) -> str:
    """The first few of ``names`` for a message, and how many more there are."""
    every = sorted(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(printable(name, 120) for name in every[:_SHOWN]) + more


def printable(text: str, limit: int = 1200) -> str:
    """``text`` for a log or an answer: no line ends, no control characters, no halves of characters, not too long."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:limit])
    return text if len(text) <= limit else text[: limit - 1] + "…"


def check_rank(target: str, rank: int) -> None:
    """Raises Refused unless a pair may have this rank."""
    if not 1 <= rank <= MAX_RANK:
        raise Refused(f"tensor {target} has rank {rank}; 1 to {MAX_RANK} are supported")


def check_scale(target: str, scale: float) -> None:
    """Raises Refused unless ``scale`` is a number that the engine can compute with."""
    if not math.isfinite(scale) or abs(scale) > _FLOAT32_MAX:
        raise Refused(f"tensor {target} has the scale {scale}, which is not a finite number; check alpha")


class WeightShape(NamedTuple):
    """A weight: (n_out, n_in), or that of each of ``n_expert`` experts; 0: no experts."""

    n_out: int
    n_in: int
    n_expert: int = 0


def weight_of(base: BaseModel, target: str) -> WeightShape:
    """The base model's weight matrix or, in a mixture of experts, matrices. Raises Refused if there is none."""
    shape = base.shape_of(target)
    if shape is not None and len(shape) == 3 and _EXPERTS.fullmatch(target):
        n_expert, n_out, n_in = shape
        return WeightShape(n_out, n_in, n_expert)
    return WeightShape(*matrix_of(base, target))


def matrix_of(base: BaseModel, target: str) -> tuple[int, int]:
    """(n_out, n_in) of the base model's weight matrix. Raises Refused if there is none."""
    shape = base.shape_of(target)
    if shape is None:
        raise Refused(f"tensor {target} does not exist in the {base.describe()}; the adapter is for another model")
    if len(shape) != 2:
        raise Refused(f"tensor {target} has {len(shape)} dimensions in the base model; only matrices are supported")
    n_out, n_in = shape
    return n_out, n_in


def check_shapes(base: BaseModel, target: str, a: tuple[int, ...], b: tuple[int, ...], weight: WeightShape) -> None:
    """Raises Refused unless A is (rank, n_in) and B is (n_out, rank), for a rank that is supported.

    For experts, both have the number of experts before these.
    """
    experts = (weight.n_expert,) if weight.n_expert else ()
    n_dims = 2 + len(experts)
    if len(a) != n_dims or len(b) != n_dims or a[-2] != b[-1]:
        of_each = "(experts, rank, n), B (experts, n, rank)" if experts else "(rank, n), B (n, rank)"
        raise Refused(f"tensor {target}: A {a} and B {b} are no low-rank pair; A is {of_each}")
    rank = a[-2]
    check_rank(target, rank)
    right_a, right_b = (*experts, rank, weight.n_in), (*experts, weight.n_out, rank)
    if (a, b) != (right_a, right_b):
        raise Refused(
            f"tensor {target} has the wrong shape: A {a}, B {b}; the {base.describe()} needs "
            f"A {right_a}, B {right_b}; the adapter is for another model"
        )


def checked_pair(base: BaseModel, target: str, op: Op, a: NDArray[Any], b: NDArray[Any], scale: float) -> LoraTensor:
    """The pair as a :class:`LoraTensor`, if it fits ``base``. Shapes as LoraTensor has them. Raises Refused."""
    check_shapes(base, target, a.shape, b.shape, multiplied(weight_of(base, target), op))
    if not np.isfinite(a).all() or not np.isfinite(b).all():
        raise Refused(f"tensor {target} holds NaN or infinite weights; the adapter is damaged")
    check_scale(target, scale)
    return LoraTensor(
        target, op, np.ascontiguousarray(a, dtype=np.float32), np.ascontiguousarray(b, dtype=np.float32), scale
    )


def multiplied(weight: WeightShape, op: Op) -> WeightShape:
    """The weight as its operation multiplies it: an embedding, which is looked up, the other way round."""
    return WeightShape(weight.n_in, weight.n_out) if op is Op.GET_ROWS else weight


def op_for(target: str) -> Op:
    """The operation whose result a pair for ``target`` corrects."""
    return Op.GET_ROWS if target == TOKEN_EMBD else Op.MUL_MAT


class _Targeted(Protocol):
    @property
    def target(self) -> str: ...


_T = TypeVar("_T", bound=_Targeted)


def in_graph_order(tensors: Iterable[_T]) -> tuple[_T, ...]:
    """Embedding, then layer by layer, then the head: an order that does not depend on the file's."""

    def key(tensor: _T) -> tuple[int, int, str]:
        parts = tensor.target.split(".")
        layer = int(parts[1]) if parts[0] == "blk" and len(parts) > 1 and parts[1].isdecimal() else 0
        place = {TOKEN_EMBD: 0, OUTPUT: 2}.get(tensor.target, 1)
        return place, layer, tensor.target

    return tuple(sorted(tensors, key=key))
