"""The shared worker's life: its start, its replacement when it has ended or is to be drained, its end."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from loraproxy.backends.base import Backend, WorkerExit
from loraproxy.errors import ApiError, StartFailed
from loraproxy.metrics import Metrics
from loraproxy.pool.backoff import Backoff
from loraproxy.pool.loading import WorkerLoader
from loraproxy.pool.residency import Residency
from loraproxy.pool.tasks import cancelled
from loraproxy.pool.worker import State, Worker

log = logging.getLogger(__name__)

_GRACE = 10.0
"""Seconds from SIGTERM to SIGKILL for a drained worker."""


@dataclass(frozen=True)
class WorkerLimits:
    """What a worker may hold of adapters, and how many workers there may be."""

    memory: int = 0
    """Bytes of adapters; 0: no limit."""
    ignore_unsupported: bool = False
    two_fit: bool = True
    """There is memory for a second worker while one is drained."""


class Keeper:
    """Sees to it that there is one worker that takes requests; a second is there while one of the two leaves."""

    def __init__(
        self,
        make_backend: Callable[[], Backend],
        metrics: Metrics,
        limits: WorkerLimits,
        backoff: Backoff,
        gone: Callable[[], ApiError],
    ) -> None:
        """``gone`` gives the error of a request that a worker had not been sent when it ended."""
        self._make_backend = make_backend
        self._metrics = metrics
        self._limits = limits
        self._backoff = backoff
        self._gone = gone
        self._ids = itertools.count()
        self._asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self.moved = asyncio.Event()
        """Set, and replaced by another, whenever a worker has come or gone."""
        self.worker = self._make_worker()
        """The one that takes requests, or will."""
        self.others: list[Worker] = []
        """One that is drained, or that starts to take the place of ``worker``."""
        self.failures = 0
        """Workers in a row that ended by themselves or could not be started; forgotten after a time of health."""
        self.retry_at = 0.0
        """When the next one is started, by the loop's clock."""
        self.last_error = ""
        self.restarts = 0
        """Workers replaced since the start."""
        self.ending = False
        """Nothing is to be replaced any more, unless it fails."""

    async def start(self) -> None:
        """Return when the worker's process is ready. Raises StartFailed."""
        self._metrics.worker_spawned()
        try:
            await self.worker.backend.start()
        except StartFailed:
            self._metrics.worker_died()
            raise

    def keep(self) -> None:
        """The worker may be used from now on, and is replaced whenever it ends."""
        self._set_ready(self.worker)
        self._task = asyncio.create_task(self._keep())

    def replace(self, worker: Worker) -> None:
        """Have ``worker`` leave, with another in its place; it is drained first where not both fit the memory."""
        if worker is self.worker and worker.state is State.READY:
            self._asked.set()
            if not self._limits.two_fit:
                self._drain(worker, "asked to")

    def end(self) -> None:
        """Refuse new requests from now on."""
        self.ending = True
        if self.worker.state is State.READY:
            self._drain(self.worker, "the server ends")
        self.wake()

    async def close(self, grace: float) -> None:
        """Stop all workers, with ``grace`` seconds until they are killed. May be called again, with less."""
        self.ending = True
        self.wake()
        for task in (*self._leaving, *([self._task] if self._task else ())):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        workers = (self.worker, *self.others)
        for worker in workers:
            worker.move(State.STOPPED, "the server ends")
            await worker.residency.close(self._gone())
        await asyncio.gather(*(worker.backend.stop(grace) for worker in workers))

    def wake(self) -> None:
        """Have those that wait for a worker look again."""
        self.moved.set()
        self.moved = asyncio.Event()

    # -- inside --------------------------------------------------------------------------------------------

    def _make_worker(self) -> Worker:
        backend = self._make_backend()
        loader = WorkerLoader(backend, self._metrics, ignore_unsupported=self._limits.ignore_unsupported)
        return Worker(backend, Residency(loader, self._limits.memory), next(self._ids))

    def _set_ready(self, worker: Worker) -> None:
        worker.move(State.READY, "healthy")
        if self.ending:
            worker.move(State.DRAINING, "the server ends")
        self.wake()

    def _drain(self, worker: Worker, reason: str) -> None:
        self._metrics.worker_drained()
        worker.move(State.DRAINING, f"{reason}; {worker.in_flight} in flight")

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            worker, ready_since = self.worker, loop.time()
            self._asked.clear()
            end = await _end_of(worker, self._asked)
            if end is None and self._limits.two_fit:
                end = await self._replace_beside(worker)
                if end is None:
                    continue
            elif end is None:
                end = await _end_of(worker, worker.drained)
                if end is None and self.ending:
                    return
            if end is None or loop.time() - ready_since >= self._backoff.healthy_after:
                self.failures = 0
            self.failures += end is not None
            await self._see_off(worker, end)
            await self._start_another()

    async def _see_off(self, worker: Worker, end: WorkerExit | None) -> None:
        """Clear up after ``worker``, which ended by itself (``end``) or is drained."""
        if end is not None:
            self._metrics.worker_died()
            self.last_error = end.report()
            log.error("the worker ended: %s; %d requests in flight fail", end.report(), worker.in_flight)
            worker.move(State.FAILED, f"{end}")
        else:
            self._metrics.worker_stopped()
            worker.move(State.STOPPED, "drained")
        self.wake()
        await worker.residency.close(self._gone())
        await worker.backend.stop(0 if end else _GRACE)

    async def _replace_beside(self, old: Worker) -> WorkerExit | None:
        """Start a worker while ``old`` serves, and let it take the place. Where it does not start, ``old`` stays.

        Returns how ``old`` ended, if that happens meanwhile.
        """
        new = self._make_worker()
        self.others.append(new)
        self._metrics.worker_spawned()
        log.info("starting a new worker, to take the place of worker %d", old.id)
        starting, ended = asyncio.create_task(new.backend.start()), asyncio.create_task(old.backend.wait())
        try:
            await asyncio.wait({starting, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancelled(starting)
            await cancelled(ended)
        if starting.cancelled():
            await self._give_up(new, "the other ended first")
            return ended.result()
        try:
            starting.result()
        except StartFailed as error:
            self._could_not_start(error)
            log.error("worker %d stays", old.id)
            await self._give_up(new, str(error).partition("\n")[0])
            return None
        self.others.remove(new)
        self.others.append(old)
        self.worker = new
        self.failures = 0
        self.restarts += 1
        self._set_ready(new)
        self._drain(old, "another has its place")
        leaving = asyncio.create_task(self._let_leave(old))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        return None

    async def _give_up(self, new: Worker, reason: str) -> None:
        new.move(State.FAILED, reason)
        await new.backend.stop(0)
        self.others.remove(new)

    async def _let_leave(self, old: Worker) -> None:
        """See ``old`` off when its last request has ended."""
        await self._see_off(old, await _end_of(old, old.drained))
        self.others.remove(old)

    async def _start_another(self) -> None:
        """Start workers until one is ready, in the place of one that is gone."""
        loop = asyncio.get_running_loop()
        while True:
            delay = self._backoff.delay(self.failures) if self.failures else 0.0
            self.retry_at = loop.time() + delay
            log.warning("starting a new worker in %g s", delay)
            await asyncio.sleep(delay)
            # The old worker's requests end with it; each gives its lease back to the object it took it from.
            worker = self.worker = self._make_worker()
            self._metrics.worker_spawned()
            try:
                await worker.backend.start()
            except StartFailed as error:
                self._could_not_start(error)
                worker.move(State.FAILED, str(error).partition("\n")[0])
                self.failures = max(self.failures + 1, 2)
                self.wake()
                await worker.backend.stop(0)
                continue
            self.restarts += 1
            self._set_ready(worker)
            log.info("the new worker is ready")
            return

    def _could_not_start(self, error: StartFailed) -> None:
        self.last_error = str(error)
        self._metrics.worker_died()
        log.error("%s", error)


async def _end_of(worker: Worker, asked: asyncio.Event) -> WorkerExit | None:
    """How ``worker`` ended by itself; None when ``asked`` is set first."""
    ended = asyncio.create_task(worker.backend.wait())
    told = asyncio.create_task(asked.wait())
    try:
        await asyncio.wait({ended, told}, return_when=asyncio.FIRST_COMPLETED)
        return ended.result() if ended.done() else None
    finally:
        ended.cancel()
        told.cancel()
