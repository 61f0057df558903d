"""A keyed pool over workers that follow a script, with a clock that the test moves."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from standin import soon, summary

from loraproxy.adapters.registry import Bound, Version
from loraproxy.adapters.sets import BASE, AdapterSet
from loraproxy.backends.base import WorkerExit
from loraproxy.errors import ApiError, StartFailed
from loraproxy.metrics import Metrics
from loraproxy.pool.backoff import Backoff
from loraproxy.pool.fleet import WorkerKind
from loraproxy.pool.keyed import KeyedPool
from loraproxy.pool.placement import Limits, Quantum
from loraproxy.pool.troubles import Patience

SHARED, OWN, ADAPTER = 1000, 100, 10
"""Bytes of the base file, of a worker, and of an adapter."""


class ManualClock:
    """Time stands still until :meth:`advance`."""

    def __init__(self) -> None:
        self.now = 100.0
        self._timers: list[tuple[float, int, Callable[[], object], list[bool]]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], object]) -> Any:
        alive = [True]
        heapq.heappush(self._timers, (when, next(self._numbers), callback, alive))
        return _Timer(alive)

    def pending(self) -> int:
        return sum(alive[0] for *_, alive in self._timers)

    async def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass, and everything happen that happens meanwhile."""
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            when, _, callback, alive = heapq.heappop(self._timers)
            if alive[0]:
                self.now = max(self.now, when)
                callback()
                await settle()
        self.now = end


class _Timer:
    def __init__(self, alive: list[bool]) -> None:
        self._alive = alive

    def cancel(self) -> None:
        self._alive[0] = False


async def settle() -> None:
    """Let everything that can go on do so."""
    for _ in range(60):
        await asyncio.sleep(0)


class ScriptedBackend:
    """One worker. What it is told is in ``bench.log``; a request on it is in ``running`` for as long as it runs."""

    base_url = "http://worker"

    def __init__(self, bench: KeyedBench, number: int) -> None:
        self.bench = bench
        self.number = number
        self.pid = 1000 + number
        self.session: Any = None
        self.has = BASE
        self.running: list[AdapterSet] = []
        self.alive = False
        self.died = asyncio.Event()
        self.words: tuple[str, ...] = ()
        self.stopped = asyncio.Event()
        self.grace: float | None = None

    def say(self, event: str) -> None:
        self.bench.log.append(f"{self.number} {event}")

    async def start(self) -> None:
        self.say("start")
        await self.bench.may_start.wait()
        if self.bench.starts_fail:
            raise StartFailed("the worker ended while it was starting: exit code 1: no memory")
        self.alive = True

    async def change(self, bound: Bound) -> None:
        assert not self.running, "a change under a running request"
        name = "+".join(version.name for version in bound.versions) or "base"
        self.say(f"change {name}")
        await self.bench.may_change.wait()
        assert not self.running, "a change under a running request"
        problems = self.bench.problems.get(name, [])
        problem = problems.pop(0) if problems else None
        if problem == "dies":
            self.die("error: no such tensor")
            await asyncio.Event().wait()
        if isinstance(problem, Exception):
            raise problem
        self.has = bound.adapters

    async def wait(self) -> WorkerExit:
        await self.died.wait()
        return WorkerExit(1, self.words)

    async def stop(self, grace: float) -> None:
        self.say("stop")
        self.grace = grace
        await self.bench.may_stop.wait()
        self.alive = False
        self.stopped.set()

    def die(self, *words: str) -> None:
        self.words = words
        self.alive = False
        self.died.set()


class KeyedBench:
    """The pool, its workers and versions of adapters by name."""

    def __init__(
        self,
        folder: Path = Path("/nowhere"),
        *,
        slots: int = 2,
        quantum: Quantum | None = None,
        backoff: Backoff | None = None,
        patience: Patience | None = None,
        **limits: Any,
    ) -> None:
        self.log: list[str] = []
        self.backends: list[ScriptedBackend] = []
        self.may_start, self.may_change, self.may_stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for event in (self.may_start, self.may_change, self.may_stop):
            event.set()
        self.starts_fail = False
        self.problems: dict[str, list[ApiError | str]] = {}
        """By set, what its next changes end with."""
        self.clock = ManualClock()
        self.versions = {
            name: Version(i, name, folder / name, summary(name, folder / name, nbytes=ADAPTER))
            for i, name in enumerate(("a", "b", "c", "d", "e", "f", "big"))
        }
        big = folder / "big"
        self.versions["big"] = Version(6, "big", big, summary("big", big, nbytes=150))
        self.metrics = Metrics(lambda: self.pool.in_flight, lambda: self.pool.restarts)
        self.pool = KeyedPool(
            WorkerKind(self._make, slots, SHARED, OWN),
            self.metrics,
            limits=Limits(**limits),
            quantum=quantum or Quantum(leases=slots, seconds=2.0),
            preload=lambda: self.warm,
            backoff=backoff,
            patience=patience,
            clock=self.clock,
        )
        self.tasks: list[asyncio.Task[Any]] = []
        self.warm: list[Bound] = []

    def keep_warm(self, *names: str) -> None:
        self.warm = [self.bound(name) for name in names]

    def _make(self) -> Any:
        self.backends.append(ScriptedBackend(self, len(self.backends)))
        return self.backends[-1]

    async def __aenter__(self) -> KeyedBench:
        await soon(self.pool.start())
        return self

    async def __aexit__(self, *exc: object) -> None:
        for event in (self.may_start, self.may_change, self.may_stop):
            event.set()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await soon(self.pool.close(0))
        assert self.pool.in_flight == 0
        assert not any(backend.alive for backend in self.backends)
        assert self.clock.pending() == 0

    def bound(self, names: str = "", scale: float = 1.0) -> Bound:
        """``a`` or ``a+b``; empty: the base."""
        return bound_of([self.versions[name] for name in names.split("+") if name], scale)

    def request(self, names: str = "", scale: float = 1.0) -> Request:
        """A request that runs until it is told to end."""
        request = Request(self, self.bound(names, scale))
        self.tasks.append(request.task)
        return request

    async def served(self, names: str = "") -> Request:
        """A request that is running."""
        request = self.request(names)
        await soon(request.running.wait())
        return request

    async def use(self, names: str = "") -> None:
        """A request from its start to its end."""
        request = await self.served(names)
        await request.end()

    def sets(self) -> dict[int, str]:
        """The workers there are, with their sets and states."""
        return {w.id: f"{w.adapters or 'base'} {w.state.value}" for w in self.pool.workers()}

    def metric(self, name: str) -> float:
        lines = self.metrics.render().decode().splitlines()
        return float(next(line.rpartition(" ")[2] for line in lines if line.rpartition(" ")[0] == name))


def bound_of(versions: Iterable[Version], scale: float = 1.0) -> Bound:
    chosen = tuple(versions)
    return Bound(AdapterSet.of({version.wire_id: scale for version in chosen}), chosen)


class Request:
    """One request in a task of its own; asserts that its worker runs its set from its start to its end."""

    def __init__(self, bench: KeyedBench, bound: Bound) -> None:
        self.bench = bench
        self.bound = bound
        self.running = asyncio.Event()
        self.may_end = asyncio.Event()
        self.worker: ScriptedBackend | None = None
        self.fails_with: Exception | None = None
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with AsyncExitStack() as stack:
            worker = await stack.enter_async_context(self.bench.pool.lease(self.bound))
            assert worker.reachable, "it is known to have ended"
            backend: Any = worker.backend
            assert backend.has == self.bound.adapters, "its worker runs another set"
            self.worker = backend
            backend.running.append(self.bound.adapters)
            stack.callback(backend.running.remove, self.bound.adapters)
            self.running.set()
            await self.may_end.wait()
            assert backend.has == self.bound.adapters, "its worker was changed under it"
            if self.fails_with is not None:
                raise self.fails_with

    async def end(self) -> None:
        self.may_end.set()
        await soon(self.task)
        await settle()
