"""The keyed workers' lives: each has one task, which starts it, changes its set, watches over it and ends it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from loraproxy.adapters.registry import Bound
from loraproxy.backends.base import KeyedBackend
from loraproxy.errors import ApiError, Conflict, ServerError, StartFailed, Unavailable, WorkerFailed
from loraproxy.logs import REQUEST_ID
from loraproxy.metrics import Metrics
from loraproxy.pool.clock import Clock, sleep
from loraproxy.pool.keyed_worker import KeyedWorker, named
from loraproxy.pool.tasks import cancelled
from loraproxy.pool.troubles import Seen, fingerprints
from loraproxy.pool.worker import State, log_transition

log = logging.getLogger(__name__)

_GRACE = 10.0
"""Seconds from SIGTERM to SIGKILL for a worker that has nothing left to do."""
_CONFLICT_WAITS = tuple(min(0.05 * 2**n, 1.0) for n in range(14))
"""Seconds between tries to change a worker that has not yet noticed that a client is gone; ten in all."""


@dataclass(frozen=True)
class WorkerKind:
    """How workers are made, and what they take."""

    make: Callable[[], KeyedBackend]
    slots: int
    """Requests that run at once on one worker."""
    shared_memory: int = 0
    """What all of them share, in bytes: the mapped base file. 0: unknown."""
    own_memory: int = 0
    """What each takes besides, without adapters: its KV cache and buffers, in bytes. 0: unknown."""

    def memory(self, bound: Bound) -> int:
        """An estimate of a worker that runs ``bound``, without what it shares, in bytes."""
        return self.own_memory + sum(version.summary.resident_bytes for version in bound.versions)


class Events(Protocol):
    """Whoever places requests on the workers, told what becomes of these."""

    def became_ready(self, worker: KeyedWorker) -> None:
        """It runs its set now."""
        ...

    def ended(self, worker: KeyedWorker, words: str, was_ready: bool) -> None:
        """It ended by itself."""
        ...

    def refused(self, bound: Bound, error: ApiError, seen: Seen) -> None:
        """A worker cannot run the set, whose files were as ``seen``; it runs what it ran before."""
        ...

    def changed(self) -> None:
        """Something else is not what it was."""
        ...


class _Ended(Exception):
    """A worker ended by itself; the message is its last words."""


class Fleet:
    """All keyed workers that have not ended."""

    def __init__(self, kind: WorkerKind, clock: Clock, metrics: Metrics, events: Events) -> None:
        self.kind = kind
        self.workers: list[KeyedWorker] = []
        """By id."""
        self._clock = clock
        self._metrics = metrics
        self._events = events
        self._ids = itertools.count()
        self._tasks: dict[KeyedWorker, asyncio.Task[None]] = {}

    @property
    def memory(self) -> int:
        """The estimate over all workers and what they share, in bytes."""
        return self.kind.shared_memory + sum(worker.memory for worker in self.workers)

    def spawn(self, bound: Bound, reason: str, *, replaces: bool) -> KeyedWorker:
        """Start a worker for ``bound``. ``replaces``: one before it failed."""
        worker = KeyedWorker(
            next(self._ids), self.kind.make(), bound, self.kind.slots, self.kind.memory(bound), replaces=replaces
        )
        self.workers.append(worker)
        self._metrics.worker_spawned()
        self._log(worker, "none", reason)
        self._tasks[worker] = asyncio.create_task(self._live(worker))
        return worker

    def drain(self, worker: KeyedWorker, goal: Bound | None, reason: str) -> None:
        """No new leases on ``worker``; when those it has end it is given ``goal``, or ended where that is None."""
        worker.goal = goal
        if goal is not None:
            worker.memory = max(worker.memory, self.kind.memory(goal))
        self._move(worker, State.DRAINING, f"{reason}; {worker.in_flight} in flight")
        self._metrics.worker_drained()

    def resume(self, worker: KeyedWorker) -> None:
        """It is not to be drained after all."""
        worker.goal = None
        worker.memory = self.kind.memory(worker.bound)
        self._move(worker, State.READY, "nobody waits any more")

    def proceed(self, worker: KeyedWorker) -> None:
        """It is drained: let it be changed or ended."""
        if worker.ordered.is_set():
            return
        if worker.goal is not None:
            reason = f"drained; {named(worker.bound)} makes way for {named(worker.goal)}"
            before, worker.bound, worker.goal = worker.bound, worker.goal, None
            worker.memory = self.kind.memory(worker.bound)
            self._move(worker, State.STARTING, reason, before)
        worker.ordered.set()

    async def close(self, grace: float) -> None:
        """End all workers at once. May be called again, with less grace, while that goes on."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        for worker in self.workers:
            if worker.state is not State.STOPPED:
                self._move(worker, State.STOPPED, "the server ends")
            worker.up = False
        await asyncio.gather(*(self._stop(worker, grace) for worker in self.workers))
        self.workers.clear()
        self._events.changed()

    # -- one worker's task ---------------------------------------------------------------------------------

    async def _live(self, worker: KeyedWorker) -> None:
        REQUEST_ID.set("")  # it outlives the request that it was started for
        try:
            await worker.backend.start()
            worker.up = True
            ended = asyncio.create_task(worker.backend.wait())
            try:
                await self._serve(worker, ended)
            finally:
                await cancelled(ended)
        except (StartFailed, ApiError, _Ended) as error:
            self._failed(worker, str(error))
        except Exception as error:
            log.exception("worker %d failed", worker.id)
            self._failed(worker, f"internal error: {error!r}")
        else:
            self._move(worker, State.STOPPED, "drained")
            self._metrics.worker_stopped()
        worker.up = False
        await self._stop(worker, _GRACE if worker.state is State.STOPPED else 0)
        self.workers.remove(worker)
        del self._tasks[worker]
        self._events.changed()

    async def _serve(self, worker: KeyedWorker, ended: asyncio.Task[Any]) -> None:
        """Give it its set whenever it has another; return when it is drained to be ended. Raises what ended it."""
        while True:
            if worker.bound.adapters != worker.has.adapters:
                await _unless_ended(ended, self._change(worker))
            worker.has = worker.bound
            self._became_ready(worker)
            await _unless_ended(ended, worker.ordered.wait())
            worker.ordered.clear()
            if worker.state is State.DRAINING:
                return

    async def _change(self, worker: KeyedWorker) -> None:
        """Give ``worker`` its new set, or leave it the one it has where that cannot be run. Raises what ended it."""
        seen, began = fingerprints(worker.bound), self._clock.time()
        try:
            await self._change_when_quiet(worker)
        except (WorkerFailed, ServerError, Unavailable, Conflict):
            raise
        except ApiError as error:
            wanted, worker.bound = worker.bound, worker.has
            worker.memory = self.kind.memory(worker.has)
            self._events.refused(wanted, error, seen)
        else:
            self._metrics.worker_changed(self._clock.time() - began)

    async def _change_when_quiet(self, worker: KeyedWorker) -> None:
        for wait in _CONFLICT_WAITS:
            try:
                return await worker.backend.change(worker.bound)
            except Conflict:
                await sleep(self._clock, wait)
        try:
            await worker.backend.change(worker.bound)
        except Conflict as error:
            raise WorkerFailed(f"a request still runs on a worker without any: {error.message}") from error

    def _became_ready(self, worker: KeyedWorker) -> None:
        now = self._clock.time()
        worker.ready_at = worker.idle_since = now
        worker.begin_turn(now)
        self._move(worker, State.READY, f"runs {named(worker.bound)}")
        self._events.became_ready(worker)

    def _failed(self, worker: KeyedWorker, words: str) -> None:
        was_ready = worker.state is not State.STARTING
        self._metrics.worker_died()
        log.error("worker %d ended: %s; %d requests in flight fail", worker.id, words, worker.in_flight)
        self._move(worker, State.FAILED, words.partition("\n")[0])
        self._events.ended(worker, words, was_ready)

    async def _stop(self, worker: KeyedWorker, grace: float) -> None:
        try:
            await worker.backend.stop(grace)
        except Exception:  # what it leaves behind must not take the pool with it
            log.exception("worker %d could not be ended cleanly", worker.id)

    def _move(self, worker: KeyedWorker, state: State, reason: str, bound: Bound | None = None) -> None:
        before = worker.move(state)
        self._log(worker, before.value, reason, bound)

    def _log(self, worker: KeyedWorker, before: str, reason: str, bound: Bound | None = None) -> None:
        log_transition(worker.id, named(bound or worker.bound), before, worker.state, reason)


async def _unless_ended(ended: asyncio.Task[Any], work: Coroutine[Any, Any, Any]) -> None:
    """``work`` to its end, unless the worker ends first. Raises what it raises, and _Ended."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancelled(task)
    if ended.done():  # whatever became of the task, this is why
        raise _Ended(ended.result().report())
    task.result()
