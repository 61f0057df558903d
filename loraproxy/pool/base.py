"""What the proxy asks of a pool of workers, shared ones or keyed ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from loraproxy.adapters.registry import Bound, Version
from loraproxy.backends.base import Backend
from loraproxy.errors import ApiError
from loraproxy.pool.worker import State


class Leased(Protocol):
    """A worker as a request sees it."""

    @property
    def backend(self) -> Backend:
        """Where to send the request."""
        ...


class AdapterStates(Protocol):
    """What is loaded, over all workers of the pool."""

    @property
    def nbytes(self) -> int:
        """Memory of the adapters that are loaded or being loaded, in bytes."""
        ...

    @property
    def budget(self) -> int:
        """What they may take, in bytes; 0: no limit."""
        ...

    @property
    def waiting(self) -> int:
        """Requests that wait for their adapters."""
        ...

    def state(self, version: Version) -> str:
        """``resident``, ``loading`` or ``registered`` (not loaded)."""
        ...

    def failure(self, version: Version) -> str:
        """Why its load failed, where it would fail again; else empty."""
        ...


@dataclass(frozen=True)
class WorkerInfo:
    """One worker as ``GET /workers`` shows it."""

    id: int
    state: State
    adapters: str | None
    """Its adapter set, written as in the ``X-LoRA`` header: empty for the base; None where it runs any set."""
    leases: int
    waiting: int
    """Requests that wait for a worker with its set."""
    since: float
    """When it came into its state, in seconds since the epoch."""
    pid: int | None
    restarts: int
    """How many before it failed in its place."""
    last_error: str
    memory: int
    """An estimate of what it takes beside the base model's file, in bytes; 0: unknown."""


class Pool(Protocol):
    """Owns the workers; every request that generates holds a lease on one from its start to its last byte."""

    @property
    def started(self) -> bool:
        """A worker was ready once: from then on one that is not there is being replaced."""
        ...

    @property
    def restarts(self) -> int:
        """Workers replaced since the start."""
        ...

    @property
    def in_flight(self) -> int:
        """Requests that hold a lease or wait for one."""
        ...

    @property
    def residency(self) -> AdapterStates:
        """What is loaded."""
        ...

    async def start(self, preload: Sequence[Version] = ()) -> None:
        """Return when requests can be served. Raises StartFailed; a first start is not tried again."""
        ...

    def reach(self) -> Leased:
        """A worker for a request that does not generate. Raises Unavailable."""
        ...

    def reachable(self) -> Sequence[Leased]:
        """All workers that answer."""
        ...

    def states(self) -> Mapping[str, int]:
        """How many workers are in which state."""
        ...

    def check_ready(self) -> None:
        """Raises Unavailable unless new requests are taken."""
        ...

    def lease(self, bound: Bound) -> AbstractAsyncContextManager[Leased]:
        """A worker that runs ``bound`` for one request, until the block ends.

        Its versions are this request's from the call on. A block that raises WorkerUnreached may be entered once more:
        another worker is taken where there is one. Raises Unavailable, and what loading raises.
        """
        ...

    async def retire(self, version: Version) -> None:
        """No new request will ask for ``version``: return when its last one has ended and it is unloaded."""
        ...

    def leases(self, version: Version) -> int:
        """Requests that run under ``version`` or wait to."""
        ...

    def last_used(self, version: Version) -> float | None:
        """When a request last began or ended under ``version`` (seconds since the epoch); None: never."""
        ...

    def broken(self) -> ApiError:
        """The error of a request whose connection to its worker broke."""
        ...

    async def drain(self, timeout: float) -> bool:
        """Refuse new leases and wait up to ``timeout`` seconds for those in flight. True when none is left."""
        ...

    async def close(self, grace: float) -> None:
        """Stop the workers, with ``grace`` seconds until they are killed. Requests still in flight fail."""
        ...

    def workers(self) -> Sequence[WorkerInfo]:
        """The workers there are, by id."""
        ...

    def drain_worker(self, worker_id: int) -> WorkerInfo:
        """Let a worker finish what it has and end it; it is replaced when it is wanted. Raises NotFound."""
        ...
