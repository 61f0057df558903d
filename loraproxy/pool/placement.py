"""Which worker runs which adapter set next: one look at everything, repeated whenever something has changed.

A set that waits gets a worker that has it, else an idle one that is changed, else a new one within the limits. Where
all are busy under other sets, one whose turn is over is drained for it: a turn ends after a number of leases or of
seconds since others began to wait. Sets are served round robin, those without any worker before those that would
like another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loraproxy.adapters.registry import Bound
from loraproxy.adapters.sets import AdapterSet
from loraproxy.pool.fair_queue import FairQueue, Line
from loraproxy.pool.fleet import Fleet
from loraproxy.pool.keyed_worker import BASE_BOUND, KeyedWorker, label, named
from loraproxy.pool.troubles import Troubles
from loraproxy.pool.worker import State

_PRELOAD_INTERVAL = 5.0
"""Seconds after which the sets to be kept warm are asked for again: their names may have come to mean others."""


@dataclass(frozen=True)
class Limits:
    """How many workers there may be and what they may take."""

    max_workers: int = 4
    memory_budget: int = 0
    """Bytes, the base file counted once; 0: no limit."""
    idle_timeout: float = 0.0
    """Seconds after which an idle worker ends, the last one excepted; 0: never."""
    max_queue: int = 256
    """Requests that may wait beyond those that run or for whom a worker is starting."""


@dataclass(frozen=True)
class Quantum:
    """How long a set may go on where others wait for its workers: leases for each worker, or seconds."""

    leases: int = 8
    seconds: float = 2.0


class Placement:
    """Decides; the fleet acts. All times are the clock's, in seconds."""

    def __init__(
        self,
        fleet: Fleet,
        queue: FairQueue,
        troubles: Troubles,
        limits: Limits,
        quantum: Quantum,
        preload: Callable[[], Sequence[Bound]] | None,
    ) -> None:
        """``preload`` tells, whenever it is asked, the sets that are to have a worker at all times; None: no such."""
        self._fleet = fleet
        self._queue = queue
        self._troubles = troubles
        self._limits = limits
        self._quantum = quantum
        self._preload = preload
        self._warm: dict[AdapterSet, Bound] = {}
        self._contended = False
        self._now = 0.0
        self._wake = math.inf
        self.retired: set[int] = set()
        """Wire ids of versions that no new request will ask for."""

    def look(self, now: float) -> float:
        """Do what can be done now; when to look again even if nothing happens (infinity: never)."""
        self._now, self._wake = now, math.inf
        if self._preload is not None:
            self._warm = {bound.adapters: bound for bound in self._preload()}
        self._let_leave()
        self._note_contention()
        for worker in self._ready():
            if not self._turn_is_over(worker):
                self._grant(worker)
        while any(self._find_worker(line) for line in self._in_turn()):
            pass  # one worker at a time: that may have changed whose turn it is
        for line in self._in_turn():
            self._make_way(line)
        for worker in self._ready():
            self._grant(worker)
        self._keep_if_unneeded()
        self._proceed()
        return self._wake

    def look_at_idle(self, now: float) -> float:
        """Likewise: end what is idle for long, and see to it that what is to be kept warm is there."""
        self._now, self._wake = now, math.inf if self._preload is None else now + _PRELOAD_INTERVAL
        if all(self._has_worker(line.bound.adapters) for line in self._in_turn()):  # those that wait come first
            for bound in self._warm.values() or ((BASE_BOUND,) if not self._fleet.workers else ()):
                self._keep_warm(bound)
        self._end_idle()
        self._proceed()
        return self._wake

    def fits(self, bound: Bound) -> bool:
        """Whether a worker for ``bound`` fits the memory when there is no other."""
        kind = self._fleet.kind
        return not self._limits.memory_budget or (kind.shared_memory + kind.memory(bound) <= self._limits.memory_budget)

    def lacking(self) -> list[Bound]:
        """The sets to be kept warm that no worker has."""
        return [bound for key, bound in self._warm.items() if not self._has_or_gets(key)]

    def excess(self) -> int:
        """Requests that wait beyond those for whom a worker is starting."""
        starting: dict[AdapterSet, int] = {}
        for worker in self._fleet.workers:
            if worker.state is State.STARTING:
                starting[worker.key] = starting.get(worker.key, 0) + worker.slots
        return len(self._queue) - sum(min(self._queue.waiting(key), slots) for key, slots in starting.items())

    # -- granting and turns --------------------------------------------------------------------------------

    def _ready(self) -> list[KeyedWorker]:
        return [worker for worker in self._fleet.workers if worker.state is State.READY]

    def _grant(self, worker: KeyedWorker) -> None:
        while worker.free > 0 and self._queue.waiting(worker.key):
            self._queue.grant(worker)

    def _has_worker(self, key: AdapterSet) -> bool:
        """One that has the set, or is being given it."""
        return any(w.key == key and w.state in (State.READY, State.STARTING) for w in self._fleet.workers)

    def _has_or_gets(self, key: AdapterSet) -> bool:
        """Likewise, or is drained for it."""
        return self._has_worker(key) or any(w.goal is not None and w.goal.adapters == key for w in self._fleet.workers)

    def _note_contention(self) -> None:
        """Turns begin anew when a set begins to wait without any worker."""
        contended = any(not self._has_worker(line.bound.adapters) and self._may_try(line.bound) for line in self._queue)
        if contended and not self._contended:
            for worker in self._ready():
                worker.begin_turn(self._now)
        self._contended = contended

    def _turn_is_over(self, worker: KeyedWorker) -> bool:
        if not self._contended:
            return False
        return worker.turn_leases >= self._quantum.leases or self._now >= worker.turn_at + self._quantum.seconds

    # -- finding a place -----------------------------------------------------------------------------------

    def _may_try(self, bound: Bound) -> bool:
        at = self._troubles.retry_at(bound.adapters)
        if at > self._now:
            self._wake = min(self._wake, at)
        return at <= self._now

    def _uncovered(self, key: AdapterSet) -> int:
        """Requests that wait under the set and for whom no worker is there or starting."""
        workers = [w for w in self._fleet.workers if w.key == key]
        coming = sum(w.slots if w.state is State.STARTING else w.free for w in workers)
        return self._queue.waiting(key) - coming

    def _in_turn(self) -> list[Line]:
        """The lines for which a worker is lacking: those without any first, then as they take turns."""
        lacking = [
            line for line in self._queue if self._uncovered(line.bound.adapters) > 0 and self._may_try(line.bound)
        ]
        return sorted(lacking, key=lambda line: self._has_worker(line.bound.adapters))

    def _find_worker(self, line: Line) -> bool:
        """Give the line an idle worker or a new one; False where there is none."""
        key = line.bound.adapters
        idle = self._idle()
        found = (
            self._change_one_of([worker for worker in idle if worker.key not in self._warm], line)
            or self._spawn(line.bound, "requests wait")
            or (not self._has_worker(key) and self._change_one_of(idle, line))
        )
        if found:
            self._queue.served(key)
        return found

    def _make_way(self, line: Line) -> None:
        """See to it that a line without any worker will have one: memory for it, or the worker of another set."""
        if self._has_or_gets(line.bound.adapters) or any(w.is_as_good_as_gone for w in self._fleet.workers):
            return  # where one goes there will be a place
        if not self._evict_for(line.bound):
            self._drain_one_for(line)

    def _idle(self) -> list[KeyedWorker]:
        """Workers that nobody uses or waits for, least recently used first."""
        idle = [w for w in self._ready() if not w.in_flight and not w.leaving and not self._queue.waiting(w.key)]
        return sorted(idle, key=lambda worker: worker.idle_since)

    def _change_one_of(self, workers: Sequence[KeyedWorker], line: Line) -> bool:
        for worker in workers:
            if self._has_room(line.bound, instead_of=worker):
                self._change(worker, line.bound, f"{named(line.bound)} waits")
                return True
        return False

    def _change(self, worker: KeyedWorker, goal: Bound | None, reason: str) -> None:
        self._fleet.drain(worker, goal, reason)
        if not worker.in_flight:
            self._fleet.proceed(worker)

    def _spawn(self, bound: Bound, reason: str) -> bool:
        if len(self._fleet.workers) >= self._limits.max_workers or not self._has_room(bound):
            return False
        self._fleet.spawn(bound, reason, replaces=self._troubles.failures(bound.adapters) > 0)
        return True

    def _has_room(self, bound: Bound, instead_of: KeyedWorker | None = None) -> bool:
        if not self._limits.memory_budget:
            return True
        freed = instead_of.memory if instead_of else 0
        return self._fleet.memory - freed + self._fleet.kind.memory(bound) <= self._limits.memory_budget

    def _evict_for(self, bound: Bound) -> bool:
        """End idle workers, so that one of them can be changed to ``bound``; False where that is not enough memory."""
        idle = self._idle()
        if not self._limits.memory_budget or not idle:
            return False
        excess = self._fleet.memory + self._fleet.kind.memory(bound) - self._limits.memory_budget - idle[0].memory
        if excess > sum(worker.memory for worker in idle[1:]):
            return False
        for worker in idle[1:]:
            if excess <= 0:
                break
            excess -= worker.memory
            self._fleet.drain(worker, None, f"{named(bound)} needs its memory")
        return True

    def _drain_one_for(self, line: Line) -> None:
        """Of the busy workers whose turn is over, one that is not the only one of its set, or has least to finish."""
        busy = [w for w in self._ready() if not w.leaving and self._has_room(line.bound, instead_of=w)]
        over = [worker for worker in busy if self._turn_is_over(worker)]
        if not over:
            self._wake = min([self._wake, *(w.turn_at + self._quantum.seconds for w in busy)])
            return
        alone = {w: sum(other.key == w.key for other in busy) == 1 for w in over}
        victim = min(over, key=lambda w: (w.key in self._warm, alone[w], w.in_flight, w.turn_at))
        self._fleet.drain(victim, line.bound, f"{named(line.bound)} waits and the turn is over")
        self._queue.served(line.bound.adapters)
        self._queue.served(victim.key)

    # -- what is drained -----------------------------------------------------------------------------------

    def _keep_if_unneeded(self) -> None:
        """A worker that is drained for a set goes on where that set no longer needs it."""
        for worker in self._fleet.workers:
            if worker.state is State.DRAINING and worker.goal and self._uncovered(worker.goal.adapters) <= 0:
                self._fleet.resume(worker)
                self._grant(worker)

    def _proceed(self) -> None:
        for worker in self._fleet.workers:
            if worker.state is State.DRAINING and not worker.in_flight:
                self._fleet.proceed(worker)

    def _let_leave(self) -> None:
        """Drain what is to end, and what has a version that is gone."""
        for worker in self._ready():
            if worker.leaving:
                self._fleet.drain(worker, None, worker.leaving)
            elif not worker.in_flight and any(v.wire_id in self.retired for v in worker.bound.versions):
                goal = BASE_BOUND if self._may_try(BASE_BOUND) else None
                self._change(worker, goal, f"{label(worker.bound)} is gone")

    # -- idle workers --------------------------------------------------------------------------------------

    def _keep_warm(self, bound: Bound) -> None:
        if self._has_or_gets(bound.adapters) or not self._may_try(bound) or not self.fits(bound):
            return
        if self._troubles.refusal(bound) is not None:
            return
        if self._spawn(bound, "to be kept warm"):
            return
        for worker in self._idle():
            if worker.key not in self._warm and self._is_idle_for_long(worker):
                if self._has_room(bound, instead_of=worker):
                    self._change(worker, bound, f"idle; {named(bound)} is to be kept warm")
                return

    def _end_idle(self) -> None:
        for worker in self._idle():
            staying = sum(not other.is_ending for other in self._fleet.workers)
            if worker.key not in self._warm and staying > 1 and self._is_idle_for_long(worker):
                self._fleet.drain(worker, None, f"idle for {self._limits.idle_timeout:g} s")

    def _is_idle_for_long(self, worker: KeyedWorker) -> bool:
        if not self._limits.idle_timeout:
            return False
        at = worker.idle_since + self._limits.idle_timeout
        if at > self._now:
            self._wake = min(self._wake, at)
        return at <= self._now
