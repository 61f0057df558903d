"""Changes of adapters that clients asked for and that are under way when the server is to end: uploads above all."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from loraproxy.errors import Unavailable
from loraproxy.pool.tasks import cancelled

T = TypeVar("T")


class Changes:
    """Counts what is under way, lets it finish, and gives up what does not."""

    def __init__(self) -> None:
        self.under_way = 0
        """How many."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self._given_up = asyncio.Event()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns. Raises what it raises, and Unavailable where the server ends before it has: it is
        cancelled then, and so are changes that come after :meth:`drain` was called, before they begin.
        """
        if self._closing:
            work.close()
            raise _ending("nothing was changed")
        self.under_way += 1
        self._idle.clear()
        task = asyncio.create_task(work)
        given_up = asyncio.create_task(self._given_up.wait())
        try:
            await asyncio.wait({task, given_up}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise _ending("this took too long and was given up")
        finally:
            given_up.cancel()
            await cancelled(task)
            self.under_way -= 1
            if not self.under_way:
                self._idle.set()

    async def drain(self, timeout: float) -> bool:
        """Refuse new ones and wait up to ``timeout`` seconds for those under way. True when none is left."""
        self._closing = True
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        return self._idle.is_set()

    async def close(self) -> None:
        """Give up what is still under way, and return when it has cleared up after itself."""
        self._closing = True
        self._given_up.set()
        await self._idle.wait()


def _ending(what: str) -> Unavailable:
    return Unavailable(f"the server is shutting down; {what}", retry_after=5)
