"""A line that says how far a long piece of work is."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

_INTERVAL = 0.1
_BAR = 24


class Progress:
    """A bar on standard error, where that is a terminal; nothing anywhere else. Erased when the block ends."""

    def __init__(self, title: str, total: int, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._title = title
        self._total = max(total, 1)
        self._done = 0
        self._shown_at = 0.0
        self._active = self._stream.isatty()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._active:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def advance(self, amount: int, what: str = "") -> None:
        """``amount`` more of the total is done; ``what`` is being worked on."""
        self._done = min(self._done + amount, self._total)
        now = time.monotonic()
        if not self._active or now - self._shown_at < _INTERVAL:
            return
        self._shown_at = now
        filled = _BAR * self._done // self._total
        bar = "#" * filled + "." * (_BAR - filled)
        self._stream.write(f"\r{self._title} [{bar}] {100 * self._done // self._total:3} % {what[:40]}\x1b[K")
        self._stream.flush()
