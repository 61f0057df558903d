"""Requests that wait for a worker: a line for each adapter set, in order within it, the sets taking turns."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from loraproxy.adapters.registry import Bound
from loraproxy.adapters.sets import AdapterSet
from loraproxy.pool.keyed_worker import KeyedWorker


@dataclass(eq=False)
class Waiter:
    """A request that waits; its future becomes the worker it may run on, with its lease taken."""

    bound: Bound
    granted: asyncio.Future[KeyedWorker]


@dataclass(eq=False)
class Line:
    """The requests that wait under one adapter set; never empty."""

    bound: Bound
    turn: int
    """The line with the lowest one is next to be given a worker."""
    waiters: deque[Waiter] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.waiters)


class FairQueue:
    """The lines, served round robin: one that had its turn comes last, as does one that has just formed."""

    def __init__(self) -> None:
        self._lines: dict[AdapterSet, Line] = {}
        self._turns = itertools.count()

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def __iter__(self) -> Iterator[Line]:
        """The lines, next in turn first."""
        return iter(sorted(self._lines.values(), key=lambda line: line.turn))

    def waiting(self, adapters: AdapterSet) -> int:
        """How many wait under ``adapters``."""
        line = self._lines.get(adapters)
        return len(line) if line else 0

    def push(self, bound: Bound) -> Waiter:
        """One more waits, behind those of the same set."""
        waiter = Waiter(bound, asyncio.get_running_loop().create_future())
        if bound.adapters not in self._lines:
            self._lines[bound.adapters] = Line(bound, next(self._turns))
        self._lines[bound.adapters].waiters.append(waiter)
        return waiter

    def grant(self, worker: KeyedWorker) -> None:
        """Give the first in the line of the worker's set a lease on it."""
        waiter = self._lines[worker.key].waiters[0]
        self.remove(waiter)
        if not waiter.granted.done():  # a cancelled request takes itself out a moment later
            worker.take()
            waiter.granted.set_result(worker)

    def served(self, adapters: AdapterSet) -> None:
        """The set had its turn, or has it now: the others that wait come first."""
        if (line := self._lines.get(adapters)) is not None:
            line.turn = next(self._turns)

    def remove(self, waiter: Waiter) -> None:
        """It waits no longer, if it still did."""
        line = self._lines.get(waiter.bound.adapters)
        if line is not None and waiter in line.waiters:
            line.waiters.remove(waiter)
            if not line.waiters:
                del self._lines[waiter.bound.adapters]

    def refuse(self, adapters: AdapterSet, error: Exception) -> None:
        """Fail all that wait under ``adapters``."""
        line = self._lines.pop(adapters, None)
        for waiter in line.waiters if line else ():
            _fail(waiter, error)

    def refuse_all(self, error: Exception) -> None:
        """Fail all that wait."""
        for adapters in tuple(self._lines):
            self.refuse(adapters, error)

    def refuse_last_of_longest(self, error: Exception) -> None:
        """Fail the newest of the longest line, so that a flood for one set does not shut out the others.

        This is the buffer stealing of stochastic fairness queueing (McKenney, 1990).
        """
        longest = max(self._lines.values(), key=len)
        waiter = longest.waiters[-1]
        self.remove(waiter)
        _fail(waiter, error)


def _fail(waiter: Waiter, error: Exception) -> None:
    if not waiter.granted.done():
        waiter.granted.set_exception(error)
