"""Commands that are told to end: what they have begun, files and processes, does not stay behind."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ends_tidily() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that what was begun is ended."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    previous = {number: signal.signal(number, end) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
