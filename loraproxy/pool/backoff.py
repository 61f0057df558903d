"""How long to wait before a worker is replaced."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Seconds to wait before a worker is replaced: doubled with each failure, forgotten after a time of health."""

    first: float = 0.5
    longest: float = 30.0
    healthy_after: float = 60.0

    def delay(self, failures: int) -> float:
        """The wait before the ``failures``-th replacement in a row, counted from 1."""
        return min(self.first * 2.0 ** min(failures - 1, 16), self.longest)
