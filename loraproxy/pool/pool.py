"""The worker pool: admission, leases, replacement of a worker that died, and drain.

The one shared worker runs any adapter sets in one batch and has a fair queue of its own, so the pool does not
hold requests back: it admits as many as may run and wait, and refuses the rest at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from loraproxy.adapters.registry import Bound, Version
from loraproxy.backends.adapter_calls import forget_prompts
from loraproxy.backends.base import Backend, Group, WorkerExit
from loraproxy.errors import ApiError, NotFound, ServerError, StartFailed, Unavailable, WorkerFailed
from loraproxy.metrics import Metrics
from loraproxy.pool.base import WorkerInfo
from loraproxy.pool.loading import WorkerLoader
from loraproxy.pool.pins import Pins
from loraproxy.pool.residency import Residency
from loraproxy.pool.worker import State, Worker

log = logging.getLogger(__name__)

_GRACE = 10.0
"""Seconds from SIGTERM to SIGKILL for a drained worker."""


@dataclass(frozen=True)
class Backoff:
    """Seconds to wait before a worker is replaced: doubled with each failure, forgotten after a time of health."""

    first: float = 0.5
    longest: float = 30.0
    healthy_after: float = 60.0

    def delay(self, failures: int) -> float:
        """The wait before the ``failures``-th replacement in a row, counted from 1."""
        return min(self.first * 2.0 ** min(failures - 1, 16), self.longest)


@dataclass(frozen=True)
class AdapterLimits:
    """What the worker may hold of adapters."""

    memory: int = 0
    """Bytes; 0: no limit."""
    ignore_unsupported: bool = False


class WorkerPool:
    """Owns the worker; every request that generates holds a lease on it from its start to its last byte."""

    def __init__(
        self,
        make_backend: Callable[[], Backend],
        metrics: Metrics,
        *,
        slots: int,
        max_queue: int,
        adapters: AdapterLimits | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        """``slots`` requests run at once on the worker, ``max_queue`` more may wait."""
        self._make_backend = make_backend
        self._metrics = metrics
        self._limits = adapters or AdapterLimits()
        self._pins = Pins()
        self._slots = slots
        self._max_queue = max_queue
        self._backoff = backoff or Backoff()
        self._ids = itertools.count()
        self._last_error = ""
        self._worker = self._make_worker()
        self._keeper: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._retry_at = 0.0
        self._draining = False
        self.started = False
        """The first worker became ready: from now on a worker that is not there is being replaced."""
        self.restarts = 0
        self.in_flight = 0
        """Requests that hold a lease, on this worker or on one that has just ended."""

    @property
    def state(self) -> State:
        """The worker's state."""
        return self._worker.state

    @property
    def residency(self) -> Residency:
        """The worker's adapters."""
        return self._worker.residency

    async def start(self, preload: Sequence[Version] = ()) -> None:
        """Start the worker and return when it is ready and has loaded ``preload``, as far as its budget goes.

        Raises StartFailed; a first start is not tried again.
        """
        self._metrics.worker_spawned()
        try:
            await self._worker.backend.start()
        except StartFailed:
            self._metrics.worker_died()
            raise
        try:
            await self._preload(preload)
        except ApiError as error:
            raise StartFailed(error.message) from error
        self._set_ready(self._worker)
        self.started = True
        self._keeper = asyncio.create_task(self._keep())

    def reach(self) -> Worker:
        """The worker, for a request that does not generate. Raises Unavailable."""
        if self._worker.reachable:
            return self._worker
        raise self._unavailable()

    def reachable(self) -> Sequence[Worker]:
        """The worker, where it answers."""
        return [self._worker] if self._worker.reachable else []

    def states(self) -> Mapping[str, int]:
        """The one worker's state; those of the servers where it is several."""
        backend = self._worker.backend
        if isinstance(backend, Group) and self._worker.reachable:
            return backend.states()
        return {self._worker.state.value: 1}

    def check_ready(self) -> None:
        """Raises Unavailable unless new requests are taken."""
        if self._worker.state is not State.READY:
            raise self._unavailable()

    @asynccontextmanager
    async def lease(self, bound: Bound) -> AsyncIterator[Worker]:
        """A worker that has the versions of ``bound`` loaded, for one request, until the block ends.

        They are this request's from the call on, whatever happens to their names. Raises Unavailable, and what
        loading raises (:meth:`Residency.hold`).
        """
        worker = self._admit()
        worker.take(bound.adapters)
        self.in_flight += 1
        self._idle.clear()
        try:
            with self._pins.hold(bound.versions):
                async with worker.residency.hold(bound.versions):
                    yield worker
        except WorkerFailed as error:
            raise (self.broken() if self._draining else error) from error
        finally:
            worker.give_back(bound.adapters)
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
        if self._draining:
            return Unavailable("the server is shutting down", retry_after=5)
        return WorkerFailed("the worker ended while it worked on this request; try again")

    async def drain(self, timeout: float) -> bool:
        """Refuse new leases and wait up to ``timeout`` seconds for those in flight. True when none is left."""
        self._draining = True
        if self._worker.state is State.READY:
            self._worker.move(State.DRAINING, "the server ends")
            self._metrics.worker_drained()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        return self._idle.is_set()

    async def close(self, grace: float) -> None:
        """Stop the worker, with ``grace`` seconds until it is killed. Requests still in flight fail."""
        self._draining = True
        if self._keeper is not None:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
        self._worker.move(State.STOPPED, "the server ends")
        await self._worker.residency.close(self.broken())
        await self._worker.backend.stop(grace)

    def workers(self) -> Sequence[WorkerInfo]:
        """The one worker."""
        worker = self._worker
        pid = getattr(worker.backend, "pid", None)  # a server that was running before has none
        return [
            WorkerInfo(
                id=worker.id,
                state=worker.state,
                adapters=None,
                leases=worker.in_flight,
                waiting=worker.residency.waiting,
                since=worker.since,
                pid=pid if isinstance(pid, int) else None,
                restarts=self.restarts,
                last_error=self._last_error,
                memory=worker.residency.nbytes,
            )
        ]

    def drain_worker(self, worker_id: int) -> WorkerInfo:
        """Refuse new leases until the worker has finished what it has and a new one is ready.

        Raises NotFound where there is no such worker, and Unavailable where it is not ready.
        """
        if worker_id != self._worker.id:
            raise NotFound(f"there is no worker {worker_id}; there is: {self._worker.id}")
        if self._worker.state is not State.DRAINING:
            self.check_ready()
            self._metrics.worker_drained()
            self._worker.move(State.DRAINING, f"asked to; {self._worker.in_flight} in flight")
        return self.workers()[0]

    def _make_worker(self) -> Worker:
        backend = self._make_backend()
        loader = WorkerLoader(backend, self._metrics, ignore_unsupported=self._limits.ignore_unsupported)
        return Worker(backend, Residency(loader, self._limits.memory), next(self._ids))

    async def _preload(self, versions: Sequence[Version]) -> None:
        size = 0
        for version in versions:
            size += version.summary.resident_bytes
            if self._limits.memory and size > self._limits.memory:
                return
            async with self._worker.residency.hold((version,)):
                pass

    def _admit(self) -> Worker:
        self.check_ready()
        worker = self._worker
        if worker.in_flight >= self._slots + self._max_queue:
            raise Unavailable(
                f"too many requests: {self._slots} run and {self._max_queue} wait; try again later", retry_after=1
            )
        return worker

    def _unavailable(self) -> Unavailable:
        if self._draining:
            return Unavailable("the server is shutting down", retry_after=5)
        if not self.started:
            return Unavailable("Loading model", retry_after=1)
        wait = max(self._retry_at - asyncio.get_running_loop().time(), 0.0)
        if self._worker.state is State.DRAINING:
            return Unavailable("the worker is drained, to be replaced; try again later", retry_after=5)
        return Unavailable("the worker ended and is being replaced; try again later", retry_after=math.ceil(wait) + 1)

    def _set_ready(self, worker: Worker) -> None:
        worker.move(State.READY, "healthy")
        if self._draining:
            worker.move(State.DRAINING, "the server ends")

    async def _keep(self) -> None:
        """Replace the worker whenever it ends or is drained, for as long as the pool is open."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            ready_since = loop.time()
            end = await self._end_or_drained()
            worker = self._worker
            if end is not None:
                self._metrics.worker_died()
                self._last_error = end.report()
                log.error("the worker ended: %s; %d requests in flight fail", end.report(), worker.in_flight)
                worker.move(State.FAILED, f"{end}")
            else:
                self._metrics.worker_stopped()
                worker.move(State.STOPPED, "drained")
            await worker.residency.close(self.broken())
            await worker.backend.stop(0 if end else _GRACE)
            if end is None or loop.time() - ready_since >= self._backoff.healthy_after:
                failures = 0
            failures = await self._replace(failures + (end is not None))

    async def _end_or_drained(self) -> WorkerExit | None:
        """How the worker ended by itself; None when it is drained, to be replaced."""
        ended = asyncio.create_task(self._worker.backend.wait())
        drained = asyncio.create_task(self._worker.drained.wait())
        try:
            await asyncio.wait({ended, drained}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return ended.result()
            if self._draining:  # the server ends: nothing is to be replaced, unless it fails
                return await ended
            return None
        finally:
            ended.cancel()
            drained.cancel()

    async def _replace(self, failures: int) -> int:
        """Start workers until one is ready. Returns the number of failures in a row so far."""
        loop = asyncio.get_running_loop()
        while True:
            delay = self._backoff.delay(failures) if failures else 0.0
            self._retry_at = loop.time() + delay
            log.warning("starting a new worker in %g s", delay)
            await asyncio.sleep(delay)
            # The old worker's requests end with it; each gives its lease back to the object it took it from.
            worker = self._worker = self._make_worker()
            self._metrics.worker_spawned()
            try:
                await worker.backend.start()
            except StartFailed as error:
                self._last_error = str(error)
                worker.move(State.FAILED, str(error).partition("\n")[0])
                self._metrics.worker_died()
                log.error("%s", error)
                await worker.backend.stop(0)
                failures += 1
                continue
            self.restarts += 1
            self._set_ready(worker)
            log.info("the new worker is ready")
            return failures
