"""What can be seen of keyed workers and of the adapters they run."""

from __future__ import annotations

from loraproxy.adapters.registry import Version
from loraproxy.pool.base import WorkerInfo
from loraproxy.pool.fair_queue import FairQueue
from loraproxy.pool.fleet import Fleet
from loraproxy.pool.keyed_worker import KeyedWorker, label
from loraproxy.pool.troubles import Troubles
from loraproxy.pool.worker import State


class KeyedAdapters:
    """Which adapters are loaded, over all keyed workers (:class:`loraproxy.pool.base.AdapterStates`)."""

    budget = 0
    """The memory is bounded by the workers', not by the adapters'."""

    def __init__(self, fleet: Fleet, queue: FairQueue, troubles: Troubles) -> None:
        self._fleet = fleet
        self._queue = queue
        self._troubles = troubles

    @property
    def nbytes(self) -> int:
        """Memory of the adapters of all workers, in bytes; one that several have counts for each."""
        return sum(v.summary.resident_bytes for worker in self._fleet.workers for v in worker.bound.versions)

    @property
    def waiting(self) -> int:
        """Requests that wait for a worker."""
        return len(self._queue)

    def state(self, version: Version) -> str:
        """``resident``, ``loading`` or ``registered`` (not loaded)."""
        states = {worker.state for worker in self._fleet.workers if _has(worker, version)}
        if states & {State.READY, State.DRAINING}:
            return "resident"
        return "loading" if State.STARTING in states else "registered"

    def failure(self, version: Version) -> str:
        """Why its load failed, where it would fail again; else empty."""
        return self._troubles.failure(version)


def info(worker: KeyedWorker, queue: FairQueue, troubles: Troubles) -> WorkerInfo:
    """``worker`` as ``GET /workers`` shows it."""
    pid = getattr(worker.backend, "pid", None)  # a server that was running before has none
    return WorkerInfo(
        id=worker.id,
        state=worker.state,
        adapters=label(worker.bound),
        leases=worker.in_flight,
        waiting=queue.waiting(worker.key),
        since=worker.since,
        pid=pid if isinstance(pid, int) else None,
        restarts=troubles.failures(worker.key),
        last_error=troubles.last_words(worker.key),
        memory=worker.memory,
    )


def _has(worker: KeyedWorker, version: Version) -> bool:
    return any(v.wire_id == version.wire_id for v in worker.bound.versions)
