"""Time, which tests move by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Protocol


class Timer(Protocol):
    """Something that will happen unless it is cancelled."""

    def cancel(self) -> None:
        """Let it not happen."""
        ...


class Clock(Protocol):
    """What the pools ask of time."""

    def time(self) -> float:
        """Seconds since whenever."""
        ...

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Call ``callback`` when ``time()`` has come to ``when``."""
        ...


async def sleep(clock: Clock, seconds: float) -> None:
    """Return ``seconds`` later."""
    woken = asyncio.Event()
    timer = clock.call_at(clock.time() + seconds, woken.set)
    try:
        await woken.wait()
    finally:
        timer.cancel()


class LoopClock:
    """The time of the event loop that is running."""

    def time(self) -> float:
        """Seconds, monotonic."""
        return asyncio.get_running_loop().time()

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """As the loop's, but on nobody's behalf: what happens then is not the doing of the request that asked."""
        return asyncio.get_running_loop().call_at(when, callback, context=Context())
