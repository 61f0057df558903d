"""A tensor as it lies in an adapter's or a model's file."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gguf.constants import GGMLQuantizationType


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: ``shape`` in numpy order (rows first), ``offset`` from the start of the file, in bytes."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    n_bytes: int

    @property
    def n_values(self) -> int:
        """How many values it holds."""
        return math.prod(self.shape)
