"""Several adapters at their scales as one adapter, for servers that take a single one and know no scale.

A set adds ``sum_i s_i * c_i * B_i @ (A_i @ x)`` to a projection (c_i: alpha over rank). With the ``A_i`` stacked into
one A of rank ``sum_i r_i`` and the ``s_i * c_i * B_i`` side by side as one B, ``B @ (A @ x)`` is that sum: the ranks
are concatenated, the scales folded into B. Nothing is approximated, so ranks and alphas may differ.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.checks import Refused, checked_pair, in_graph_order
from loraproxy.adapters.sets import f32
from loraproxy.adapters.tensors import Adapter, LoraTensor, Op
from loraproxy.errors import InvalidAdapterFile

SOURCE = "composed"
"""``Adapter.source`` of an adapter that was made here and lies in no file."""


def set_digest(members: Iterable[tuple[str, float]]) -> str:
    """A hex SHA-256 that names a set by its content: (adapter digest in hex, scale) in any order.

    Scales count as the float32 they are applied as; zero scales do not count, since they change nothing.
    """
    digest = hashlib.sha256(b"loraproxy adapter set 1\n")
    for adapter, scale in sorted((adapter, f32(scale)) for adapter, scale in members):
        if scale != 0.0:
            digest.update(bytes.fromhex(adapter) + struct.pack("<f", scale))
    return digest.hexdigest()


def compose(adapters: Sequence[tuple[Adapter, float]], base: BaseModel) -> Adapter:
    """One adapter that changes ``base`` as all of ``adapters`` at their scales do together.

    Its pairs have scale 1, its name lists the members (``bard=0.7+pirate=0.5``), its digest is the set's
    :func:`set_digest`, its path is empty. The order of ``adapters`` makes no difference. Raises InvalidAdapterFile
    where the sum of the ranks is more than an adapter may have, a scaled weight is out of range, or a member is an
    activated LoRA, which applies from a certain token on; ValueError for a set that is the base model.
    """
    members = sorted(
        ((a, f32(s)) for a, s in adapters if f32(s) != 0.0), key=lambda member: (member[0].digest, member[1])
    )
    if not members:
        raise ValueError("a set without adapters is the base model; there is nothing to compose")
    name = "+".join(sorted(f"{adapter.name}={scale:.6g}" for adapter, scale in members))
    if activated := [adapter.name for adapter, _ in members if adapter.invocation_tokens]:
        raise InvalidAdapterFile(
            f"adapters {name}: {', '.join(activated)} is an activated LoRA (aLoRA), which one adapter for all tokens "
            "cannot stand for"
        )
    pairs: dict[tuple[str, Op], list[tuple[LoraTensor, float]]] = {}
    for adapter, scale in members:
        for tensor in adapter.tensors:
            pairs.setdefault((tensor.target, tensor.op), []).append((tensor, scale))
    try:
        tensors = in_graph_order(_stacked(parts, base) for parts in pairs.values())
    except Refused as error:
        raise InvalidAdapterFile(f"adapters {name}: {error}") from None
    digest = set_digest((adapter.digest, scale) for adapter, scale in members)
    notes = tuple(f"{adapter.name}: {note}" for adapter, _ in members for note in adapter.notes)
    left_out = tuple(f"{adapter.name}: {sentence}" for adapter, _ in members for sentence in adapter.left_out)
    return Adapter(name, Path(), digest, SOURCE, tensors, notes, left_out)


def _stacked(parts: Sequence[tuple[LoraTensor, float]], base: BaseModel) -> LoraTensor:
    """All pairs of one projection as one of scale 1."""
    first = parts[0][0]
    a: NDArray[np.float32] = np.concatenate([tensor.a for tensor, _ in parts], axis=-2)
    with np.errstate(over="ignore"):  # checked_pair refuses what overflows
        b = np.concatenate([tensor.b * np.float32(tensor.scale * scale) for tensor, scale in parts], axis=-1)
    return checked_pair(base, first.target, first.op, a, b, 1.0)
