"""The adapter set: which adapters, at which scales, one request runs under."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypedDict


class WireEntry(TypedDict):
    """One item of llama-server's ``lora`` field."""

    id: int
    scale: float


def f32(value: float) -> float:
    """``value`` rounded to the nearest float32, which is what the kernels compute with."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


@dataclass(frozen=True)
class AdapterSet:
    """A canonical adapter set: sorted by adapter id, zero scales dropped. Empty means the base model.

    ``entries`` holds ``(adapter id, scale)``; scales are finite float32 values. Hashable, so it keys
    the prompt cache and the scheduler's queues.
    """

    entries: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, scales: Mapping[int, float] | Iterable[tuple[int, float]]) -> AdapterSet:
        """Build the canonical set. Raises ValueError for a scale that is not a finite float32, or an id given twice."""
        items = list(scales.items() if isinstance(scales, Mapping) else scales)
        if len({i for i, _ in items}) != len(items):
            raise ValueError("an adapter is named twice")
        entries = []
        for adapter_id, scale in sorted(items):
            try:
                scale = f32(scale)
            except OverflowError:
                scale = math.inf
            if not math.isfinite(scale):
                raise ValueError(f"the scale of adapter {adapter_id} is not a finite number")
            if scale != 0.0:
                entries.append((adapter_id, scale))
        return cls(tuple(entries))

    @property
    def is_base(self) -> bool:
        """True when no adapter is applied."""
        return not self.entries

    def wire(self) -> list[WireEntry]:
        """The set as llama-server's ``lora`` field."""
        return [{"id": i, "scale": s} for i, s in self.entries]

    def label(self, names: Mapping[int, str]) -> str:
        """``pirate=1,bard=0.5``: the set as the ``X-LoRA`` header shows it; empty for the base."""
        return ",".join(f"{names[i]}={s:.6g}" for i, s in self.entries)


BASE = AdapterSet()
