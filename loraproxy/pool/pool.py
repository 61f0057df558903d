"""The worker pool: admission, leases, replacement of a worker that died, and drain.

The one shared worker runs any adapter sets in one batch and has a fair queue of its own, so the pool does not
hold requests back: it admits as many as may run and wait, and refuses the rest at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from loraproxy.adapters.sets import AdapterSet
from loraproxy.backends.base import Backend
from loraproxy.errors import ApiError, StartFailed, Unavailable, WorkerFailed
from loraproxy.pool.worker import State, Worker

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backoff:
    """Seconds to wait before a worker is replaced: doubled with each failure, forgotten after a time of health."""

    first: float = 0.5
    longest: float = 30.0
    healthy_after: float = 60.0

    def delay(self, failures: int) -> float:
        """The wait before the ``failures``-th replacement in a row, counted from 1."""
        return min(self.first * 2.0 ** min(failures - 1, 16), self.longest)


class WorkerPool:
    """Owns the worker; every request that generates holds a lease on it from its start to its last byte."""

    def __init__(
        self, make_backend: Callable[[], Backend], *, slots: int, max_queue: int, backoff: Backoff | None = None
    ) -> None:
        """``slots`` requests run at once on the worker, ``max_queue`` more may wait."""
        self._make_backend = make_backend
        self._slots = slots
        self._max_queue = max_queue
        self._backoff = backoff or Backoff()
        self._worker = Worker(make_backend())
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

    async def start(self) -> None:
        """Start the worker and return when it is ready. Raises StartFailed; a first start is not tried again."""
        await self._worker.backend.start()
        self._set_ready(self._worker)
        self.started = True
        self._keeper = asyncio.create_task(self._keep())

    def reach(self) -> Worker:
        """The worker, for a request that does not generate. Raises Unavailable."""
        if self._worker.reachable:
            return self._worker
        raise self._unavailable()

    def check_ready(self) -> None:
        """Raises Unavailable unless new requests are taken."""
        if self._worker.state is not State.READY:
            raise self._unavailable()

    @asynccontextmanager
    async def lease(self, adapters: AdapterSet) -> AsyncIterator[Worker]:
        """A worker for one request under ``adapters``, until the block ends. Raises Unavailable."""
        worker = self._admit()
        worker.take(adapters)
        self.in_flight += 1
        self._idle.clear()
        try:
            yield worker
        finally:
            worker.give_back(adapters)
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    def broken(self) -> ApiError:
        """The error of a request whose connection to the worker broke."""
        if self._draining:
            return Unavailable("the server is shutting down", retry_after=5)
        return WorkerFailed("the worker ended while it worked on this request; try again")

    async def drain(self, timeout: float) -> bool:
        """Refuse new leases and wait up to ``timeout`` seconds for those in flight. True when none is left."""
        self._draining = True
        if self._worker.state is State.READY:
            self._worker.state = State.DRAINING
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
        self._worker.state = State.STOPPED
        await self._worker.backend.stop(grace)

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
        return Unavailable("the worker ended and is being replaced; try again later", retry_after=math.ceil(wait) + 1)

    def _set_ready(self, worker: Worker) -> None:
        worker.state = State.DRAINING if self._draining else State.READY

    async def _keep(self) -> None:
        """Replace the worker whenever it ends, for as long as the pool is open."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            ready_since = loop.time()
            end = await self._worker.backend.wait()
            self._worker.state = State.FAILED
            log.error("the worker ended: %s; %d requests in flight fail", end.report(), self._worker.in_flight)
            await self._worker.backend.stop(0)
            if loop.time() - ready_since >= self._backoff.healthy_after:
                failures = 0
            failures = await self._replace(failures + 1)

    async def _replace(self, failures: int) -> int:
        """Start workers until one is ready. Returns the number of failures in a row so far."""
        loop = asyncio.get_running_loop()
        while True:
            delay = self._backoff.delay(failures)
            self._retry_at = loop.time() + delay
            log.warning("starting a new worker in %g s", delay)
            await asyncio.sleep(delay)
            # The old worker's requests end with it; each gives its lease back to the object it took it from.
            worker = self._worker = Worker(self._make_backend())
            try:
                await worker.backend.start()
            except StartFailed as error:
                worker.state = State.FAILED
                log.error("%s", error)
                await worker.backend.stop(0)
                failures += 1
                continue
            self.restarts += 1
            self._set_ready(worker)
            log.info("the new worker is ready")
            return failures
