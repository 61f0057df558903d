"""The pool of keyed workers, each of which runs one adapter set at a time.

A request waits in the line of its set until a worker has the set and a free slot; :mod:`loraproxy.pool.placement`
decides which worker that will be, :mod:`loraproxy.pool.fleet` makes it so. A worker is drained before its set
changes, so no running request sees another's adapters or scales.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter as Count
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from loraproxy.adapters.registry import Bound, Version
from loraproxy.errors import (
    ApiError,
    InvalidRequest,
    NotFound,
    StartFailed,
    Unavailable,
    WorkerFailed,
    WorkerUnreached,
)
from loraproxy.metrics import Metrics
from loraproxy.pool.backoff import Backoff
from loraproxy.pool.base import WorkerInfo
from loraproxy.pool.clock import Clock, LoopClock, Timer
from loraproxy.pool.fair_queue import FairQueue
from loraproxy.pool.fleet import Fleet, WorkerKind
from loraproxy.pool.keyed_view import KeyedAdapters, info
from loraproxy.pool.keyed_worker import KeyedWorker, named
from loraproxy.pool.pins import Pins
from loraproxy.pool.placement import Limits, Placement, Quantum
from loraproxy.pool.troubles import Patience, Seen, Troubles
from loraproxy.pool.worker import State

log = logging.getLogger(__name__)

_ORDER = (State.READY, State.DRAINING, State.STARTING)
"""Which workers are asked first for what is not a generation."""


class KeyedPool:
    """Owns the keyed workers; has the face that the proxy asks for (:class:`loraproxy.pool.base.Pool`)."""

    def __init__(
        self,
        kind: WorkerKind,
        metrics: Metrics,
        *,
        limits: Limits | None = None,
        quantum: Quantum | None = None,
        backoff: Backoff | None = None,
        patience: Patience | None = None,
        preload: Callable[[], Sequence[Bound]] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``preload`` tells, whenever it is asked, the sets to be kept warm; ``quantum`` is a lease for each slot, or
        two seconds, where it is not given.
        """
        self._kind = kind
        self._limits = limits or Limits()
        self._clock = clock or LoopClock()
        self._queue = FairQueue()
        self._troubles = Troubles(backoff or Backoff(), patience or Patience())
        self._fleet = Fleet(kind, self._clock, metrics, self)
        self._placement = Placement(
            self._fleet, self._queue, self._troubles, self._limits, quantum or Quantum(leases=kind.slots), preload
        )
        self._pins = Pins()
        self._timer: Timer | None = None
        self._moved = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._running = False
        self._draining = False
        self._start_failed = ""
        self.residency = KeyedAdapters(self._fleet, self._queue, self._troubles)
        self.started = False
        self.restarts = 0
        self.in_flight = 0
        """Requests that hold a lease or wait for one."""

    @property
    def state(self) -> State:
        """The best state of its workers; ``failed`` where there is none."""
        states = {worker.state for worker in self._fleet.workers}
        if self._draining:
            return State.DRAINING if states else State.STOPPED
        if not self.started:
            return State.STARTING
        return next((state for state in _ORDER if state in states), State.FAILED)

    async def start(self, preload: Sequence[Version] = ()) -> None:
        """Start the workers of the sets to be kept warm, else one with the base model, and return when they are ready.

        ``preload`` is for shared workers: here adapters are loaded with their sets. Raises StartFailed; a first start
        is not tried again.
        """
        self._running = True
        self._look()
        if not self._fleet.workers:
            raise StartFailed("not one worker fits the memory there is for all workers (--memory-budget)")
        while not all(worker.state is State.READY for worker in self._fleet.workers) and not self._start_failed:
            await self._moved.wait()
        if self._start_failed or not self._fleet.workers:
            raise StartFailed(self._start_failed or "the server was stopped")
        if lacking := self._placement.lacking():
            log.warning("no room to keep warm (--max-workers, --memory-budget): %s", ", ".join(map(named, lacking)))
        self.started = True

    def reach(self) -> KeyedWorker:
        """A worker, whatever set it has, for a request that does not generate. Raises Unavailable."""
        reachable = self.reachable()
        if not self.started or not reachable:
            raise self._unavailable()
        return min(reachable, key=lambda worker: (_ORDER.index(worker.state), worker.in_flight))

    def reachable(self) -> Sequence[KeyedWorker]:
        """All workers that answer, whatever sets they have."""
        return [worker for worker in self._fleet.workers if worker.reachable]

    def check_ready(self) -> None:
        """Raises Unavailable unless new requests are taken."""
        if self._draining:
            raise self._unavailable()
        self.reach()

    @asynccontextmanager
    async def lease(self, bound: Bound) -> AsyncIterator[KeyedWorker]:
        """A worker that runs ``bound`` and nothing else, for one request, until the block ends.

        Its versions are this request's from the call on, whatever happens to their names. A block that ends with
        WorkerUnreached has its worker drained, so that it can be tried elsewhere. Raises Unavailable where too many
        wait or no worker can run the set, InvalidRequest where it never fits the memory, and what
        :meth:`loraproxy.backends.base.KeyedBackend.change` raises.
        """
        self._admit(bound)
        self.in_flight += 1
        self._idle.clear()
        try:
            with self._pins.hold(bound.versions):
                worker = await self._wait_for_worker(bound)
                try:
                    yield worker
                except WorkerUnreached:
                    worker.leaving = worker.leaving or "it does not accept connections"
                    raise
                finally:
                    self._give_back(worker)
        except WorkerFailed as error:
            raise (self.broken() if self._draining else error) from error
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    async def retire(self, version: Version) -> None:
        """No new request will ask for ``version``: when its last one ends, the worker that has it is given the base
        model again. Return after that.
        """
        await self._pins.until_unused(version)
        self._placement.retired.add(version.wire_id)
        try:
            self._look()
            while any(worker.holds(version) for worker in self._fleet.workers):
                await self._moved.wait()
        finally:
            self._placement.retired.discard(version.wire_id)
            self._troubles.forget(version)

    def leases(self, version: Version) -> int:
        """Requests that run under ``version`` or wait to."""
        return self._pins.count(version)

    def last_used(self, version: Version) -> float | None:
        """When a request last began or ended under ``version`` (seconds since the epoch); None: never."""
        return self._pins.last_used(version)

    def broken(self) -> ApiError:
        """The error of a request whose connection to its worker broke."""
        if self._draining:
            return Unavailable("the server is shutting down", retry_after=5)
        return WorkerFailed("the worker ended while it worked on this request; try again")

    async def drain(self, timeout: float) -> bool:
        """Refuse new leases; those that wait are still served. Wait up to ``timeout`` seconds for all of them.

        True when none is left.
        """
        self._draining = True
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        return self._idle.is_set()

    async def close(self, grace: float) -> None:
        """Stop the workers, with ``grace`` seconds until they are killed. Requests still in flight fail."""
        self._draining = True
        self._running = False
        self._set_timer(math.inf)
        self._queue.refuse_all(self.broken())
        await self._fleet.close(grace)

    def workers(self) -> Sequence[WorkerInfo]:
        """The workers there are, by id."""
        return [info(worker, self._queue, self._troubles) for worker in self._fleet.workers]

    def states(self) -> Mapping[str, int]:
        """How many workers are in which state."""
        return Count(worker.state.value for worker in self._fleet.workers)

    def drain_worker(self, worker_id: int) -> WorkerInfo:
        """Let a worker finish what it has and end it; one that is starting, when it is ready. Raises NotFound."""
        worker = next((w for w in self._fleet.workers if w.id == worker_id), None)
        if worker is None:
            known = ", ".join(str(w.id) for w in self._fleet.workers) or "none"
            raise NotFound(f"there is no worker {worker_id}; there are: {known}")
        worker.leaving = worker.leaving or "asked to"
        self._look()
        return info(worker, self._queue, self._troubles)

    # -- what the fleet tells ------------------------------------------------------------------------------

    def became_ready(self, worker: KeyedWorker) -> None:
        """Its set can be run."""
        self._troubles.was_ready(worker.key)
        if worker.replaces:
            worker.replaces = False
            self.restarts += 1
        self.changed()

    def ended(self, worker: KeyedWorker, words: str, was_ready: bool) -> None:
        """Its set is tried again in a while; it is refused where that has failed too often."""
        now = self._clock.time()
        if was_ready:
            self._troubles.died(worker.key, words, now, ready_for=now - worker.ready_at)
        elif self._troubles.never_ready(worker.bound, words, now):
            self._queue.refuse(worker.key, self._troubles.unavailable(worker.bound, now))
        if not self.started:
            self._start_failed = words
        self.changed()

    def refused(self, bound: Bound, error: ApiError, seen: Seen) -> None:
        """Whoever waits for the set learns why it cannot be run."""
        self._troubles.refused(bound, error, seen, self._clock.time())
        self._queue.refuse(bound.adapters, error)
        if not self.started:
            self._start_failed = error.message

    def changed(self) -> None:
        """Place anew, and wake those that wait for a state."""
        self._look()
        self._moved.set()
        self._moved = asyncio.Event()

    # -- inside --------------------------------------------------------------------------------------------

    def _admit(self, bound: Bound) -> None:
        if self._draining or not self.started:
            raise self._unavailable()
        self._troubles.check(bound, self._clock.time())
        if not self._placement.fits(bound):
            raise InvalidRequest(
                f"a worker for {named(bound)} needs more memory than there is for all workers (--memory-budget)"
            )

    async def _wait_for_worker(self, bound: Bound) -> KeyedWorker:
        """A lease on a worker that was there when it was given."""
        while True:
            waiter = self._queue.push(bound)
            self._look()
            while self._placement.excess() > self._limits.max_queue:
                self._queue.refuse_last_of_longest(
                    Unavailable(
                        f"too many requests: {self._limits.max_queue} wait for a worker; try again later", retry_after=1
                    )
                )
            try:
                worker = await waiter.granted
            except asyncio.CancelledError:
                self._queue.remove(waiter)
                if waiter.granted.done() and not waiter.granted.cancelled() and not waiter.granted.exception():
                    self._give_back(waiter.granted.result())
                else:
                    self._look()
                raise
            if worker.reachable:
                return worker
            self._give_back(worker)  # it ended between the grant and now: nothing was sent
            self._troubles.check(bound, self._clock.time())

    def _give_back(self, worker: KeyedWorker) -> None:
        worker.give_back(self._clock.time())
        self._look()

    def _look(self) -> None:
        if not self._running:
            return
        now = self._clock.time()
        wake = self._placement.look(now)
        if not self._draining:
            wake = min(wake, self._placement.look_at_idle(now))
        self._set_timer(wake)

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._clock.call_at(when, self._look) if when < math.inf else None

    def _unavailable(self) -> Unavailable:
        if self._draining:
            return Unavailable("the server is shutting down", retry_after=5)
        if not self.started:
            return Unavailable("Loading model", retry_after=1)
        return Unavailable("the workers ended and are being replaced; try again later", retry_after=1)
