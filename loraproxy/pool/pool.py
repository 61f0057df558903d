"""The pool of the one shared worker: admission and leases; :mod:`loraproxy.pool.keeper` replaces the worker.

The worker runs any adapter sets in one batch and has a fair queue of its own, so the pool does not hold requests
back: it admits as many as may run and wait, and refuses the rest at once. Only while there is no worker, since one
that served well has just ended or is drained, do requests wait here for the next.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from loraproxy.adapters.registry import Bound, Version
from loraproxy.backends.adapter_calls import forget_prompts
from loraproxy.backends.base import Backend, Group
from loraproxy.errors import ApiError, NotFound, ServerError, StartFailed, Unavailable, WorkerFailed, WorkerUnreached
from loraproxy.metrics import Metrics
from loraproxy.pool.backoff import Backoff
from loraproxy.pool.base import WorkerInfo
from loraproxy.pool.keeper import Keeper, WorkerLimits
from loraproxy.pool.pins import Pins
from loraproxy.pool.residency import Residency
from loraproxy.pool.worker import State, Worker

_BEST_FIRST = (State.READY, State.STARTING, State.DRAINING, State.FAILED)
_NOTICE = 1.0
"""Seconds within which it is known that a worker which takes no connections has ended, if it has."""


class WorkerPool:
    """Owns the worker; every request that generates holds a lease on it from its start to its last byte."""

    def __init__(
        self,
        make_backend: Callable[[], Backend],
        metrics: Metrics,
        *,
        slots: int,
        max_queue: int,
        limits: WorkerLimits | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        """``slots`` requests run at once on the worker, ``max_queue`` more may wait."""
        self._limits = limits or WorkerLimits()
        self._keeper = Keeper(make_backend, metrics, self._limits, backoff or Backoff(), self._gone)
        self._pins = Pins()
        self._slots = slots
        self._max_queue = max_queue
        self._idle = asyncio.Event()
        self._idle.set()
        self._waiting = 0
        """Requests that wait for a worker."""
        self.started = False
        """The first worker became ready and has loaded what it was to: requests are taken from now on, and a worker
        that is not there is being replaced."""
        self.in_flight = 0
        """Requests that hold a lease, on this worker or on one that has just ended, or wait for one."""

    @property
    def restarts(self) -> int:
        """Workers replaced since the start."""
        return self._keeper.restarts

    @property
    def residency(self) -> Residency:
        """The worker's adapters."""
        return self._worker.residency

    async def start(self, preload: Sequence[Version] = ()) -> None:
        """Start the worker and return when it is ready and has loaded ``preload``, as far as its budget goes.

        Raises StartFailed; a first start is not tried again.
        """
        await self._keeper.start()
        try:
            await self._preload(preload)
        except ApiError as error:
            raise StartFailed(error.message) from error
        self._keeper.keep()
        self.started = True

    def reach(self) -> Worker:
        """The worker, for a request that does not generate. Raises Unavailable."""
        if self.started and self._worker.reachable:
            return self._worker
        raise self._unavailable()

    def reachable(self) -> Sequence[Worker]:
        """The worker, where it answers."""
        return [self._worker] if self._worker.reachable else []

    def states(self) -> Mapping[str, int]:
        """How many workers are in which state; the servers' states where a worker is several."""
        found: Counter[str] = Counter()
        for worker in self._all():
            backend = worker.backend
            found.update(backend.states() if isinstance(backend, Group) and worker.reachable else [worker.state.value])
        return found

    def check_ready(self) -> None:
        """Raises Unavailable unless new requests are taken."""
        if not self.started or self._worker.state is not State.READY:
            raise self._unavailable()

    @asynccontextmanager
    async def lease(self, bound: Bound) -> AsyncIterator[Worker]:
        """A worker that has the versions of ``bound`` loaded, for one request, until the block ends.

        They are this request's from the call on, whatever happens to their names. Raises Unavailable, and what
        loading raises (:meth:`Residency.hold`).
        """
        self._check_room()
        self.in_flight += 1
        self._idle.clear()
        try:
            with self._pins.hold(bound.versions):
                worker = await self._admitted()
                worker.take(bound.adapters)
                try:
                    async with worker.residency.hold(bound.versions):
                        yield worker
                except WorkerUnreached:
                    await self._until_noticed(worker)
                    raise
                finally:
                    worker.give_back(bound.adapters)
        except WorkerFailed as error:
            raise (self.broken() if self._keeper.ending else error) from error
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    async def retire(self, version: Version) -> None:
        """No new request will ask for ``version``: unload it when its last one ends, and return after that."""
        await self._pins.until_unused(version)
        worker = self._worker
        await worker.residency.remove(version)
        if worker.reachable:
            with suppress(WorkerFailed, ServerError):  # the cache went with its worker, or goes in its own time
                await forget_prompts(worker.backend, version.wire_id, version.summary.digest)

    def leases(self, version: Version) -> int:
        """Requests that run under ``version`` or wait to."""
        return self._pins.count(version)

    def last_used(self, version: Version) -> float | None:
        """When a request last began or ended under ``version`` (seconds since the epoch); None: never."""
        return self._pins.last_used(version)

    def broken(self) -> ApiError:
        """The error of a request whose connection to the worker broke."""
        if self._keeper.ending:
            return Unavailable("the server is shutting down", retry_after=5)
        return WorkerFailed("the worker ended while it worked on this request; try again")

    async def drain(self, timeout: float) -> bool:
        """Refuse new leases and wait up to ``timeout`` seconds for those in flight. True when none is left."""
        self._keeper.end()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        return self._idle.is_set()

    async def close(self, grace: float) -> None:
        """Stop the workers, with ``grace`` seconds until they are killed. Requests still in flight fail."""
        await self._keeper.close(grace)

    def workers(self) -> Sequence[WorkerInfo]:
        """The worker, and beside it one that is drained or that starts, by id."""
        return [self._info(worker) for worker in self._all()]

    def drain_worker(self, worker_id: int) -> WorkerInfo:
        """Have a new worker take the place of this one, which then finishes what it has and ends.

        Where there is no memory for both, this one is drained first; requests wait meanwhile. Raises NotFound where
        there is no such worker, and Unavailable where it is not ready.
        """
        worker = next((worker for worker in self._all() if worker.id == worker_id), None)
        if worker is None:
            raise NotFound(f"there is no worker {worker_id}; there is: {', '.join(str(w.id) for w in self._all())}")
        if worker.state is not State.DRAINING:
            self.check_ready()
            self._keeper.replace(worker)
        return self._info(worker)

    # -- inside --------------------------------------------------------------------------------------------

    @property
    def _worker(self) -> Worker:
        return self._keeper.worker

    def _all(self) -> list[Worker]:
        return sorted((self._keeper.worker, *self._keeper.others), key=lambda worker: worker.id)

    def _info(self, worker: Worker) -> WorkerInfo:
        backend = worker.backend
        pid = getattr(backend, "pid", None)  # a server that was running before has none
        state, error = worker.state, self._keeper.last_error
        if isinstance(backend, Group) and state is State.READY:
            states = backend.states()
            state = next((state for state in _BEST_FIRST if states.get(state.value)), State.FAILED)
            error = backend.problem() or error
        return WorkerInfo(
            id=worker.id,
            state=state,
            adapters=None,
            leases=worker.in_flight,
            waiting=worker.residency.waiting + (self._waiting if worker is self._worker else 0),
            since=worker.since,
            pid=pid if isinstance(pid, int) else None,
            restarts=self.restarts,
            last_error=error,
            memory=worker.residency.nbytes,
        )

    async def _preload(self, versions: Sequence[Version]) -> None:
        size = 0
        for version in versions:
            size += version.summary.resident_bytes
            if self._limits.memory and size > self._limits.memory:
                return
            async with self._worker.residency.hold((version,)):
                pass

    def _check_room(self) -> None:
        """Raises Unavailable where as many requests run and wait as may."""
        on_worker = self._worker.in_flight if self._worker.state is State.READY else 0
        if on_worker + self._waiting >= self._slots + self._max_queue:
            raise Unavailable(
                f"too many requests: {self._slots} run and {self._max_queue} wait; try again later", retry_after=1
            )

    async def _admitted(self) -> Worker:
        """The worker, once it is ready. Raises Unavailable where that is not to be waited for."""
        self._waiting += 1
        try:
            while not self.started or self._worker.state is not State.READY:
                if self._keeper.ending or not self.started or self._keeper.failures > 1:
                    raise self._unavailable()
                await self._keeper.moved.wait()
            return self._worker
        finally:
            self._waiting -= 1

    async def _until_noticed(self, worker: Worker) -> None:
        """Return when ``worker``, which did not take a connection, is known to have ended, or well enough after."""
        with suppress(asyncio.TimeoutError):
            while worker.state is State.READY:
                await asyncio.wait_for(self._keeper.moved.wait(), _NOTICE)

    def _gone(self) -> ApiError:
        """The error of a request that its worker had not been sent when it ended."""
        if self._keeper.ending:
            return self.broken()
        return WorkerUnreached("the worker has just ended; try again later", retry_after=1)

    def _unavailable(self) -> Unavailable:
        if self._keeper.ending:
            return Unavailable("the server is shutting down", retry_after=5)
        if not self.started:
            return Unavailable("Loading model", retry_after=1)
        if self._worker.state is State.DRAINING:
            return Unavailable("the worker is drained, to be replaced; try again later", retry_after=5)
        wait = max(self._keeper.retry_at - asyncio.get_running_loop().time(), 0.0)
        why = f"; it said: {self._keeper.last_error}" if self._keeper.failures > 1 else ""
        return Unavailable(
            f"the worker ended and is being replaced; try again later{why}", retry_after=math.ceil(wait) + 1
        )
