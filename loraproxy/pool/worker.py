"""One worker of the pool: its state and the leases on it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from loraproxy.adapters.sets import AdapterSet
from loraproxy.backends.base import Backend
from loraproxy.pool.residency import Residency

log = logging.getLogger(__name__)


class State(str, Enum):
    """A worker's life: ``starting`` → ``ready`` → ``draining`` → ``stopped``; ``failed`` when it ended by itself."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


NEXT_STATES = {
    State.STARTING: {State.READY, State.FAILED, State.STOPPED},
    State.READY: {State.DRAINING, State.FAILED, State.STOPPED},
    State.DRAINING: {State.READY, State.STARTING, State.FAILED, State.STOPPED},
    State.FAILED: {State.STOPPED},
    State.STOPPED: set(),
}
"""Every way a worker can go. From draining a keyed worker starts anew with another set, or is ready again where nobody
waits for that any more."""


def log_transition(worker_id: int, adapters: str, before: str, state: State, reason: str) -> None:
    """One line for a worker that came into ``state``; ``adapters``: its set, or ``any``."""
    log.info(
        "event=worker_state worker=%d set=%s from=%s to=%s reason=%r",
        *(worker_id, adapters, before, state.value, reason),
    )


@dataclass(eq=False)
class Worker:
    """A backend, its state and how many requests run on it under which adapter set."""

    backend: Backend
    residency: Residency
    id: int = 0
    state: State = State.STARTING
    since: float = field(default_factory=time.time)
    """When it came into its state, in seconds since the epoch."""
    leases: Counter[AdapterSet] = field(default_factory=Counter)
    in_flight: int = 0
    """The sum of ``leases``."""
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    """It is draining, and nothing runs on it any more."""

    @property
    def reachable(self) -> bool:
        """It answers requests, new ones or only those it has."""
        return self.state in (State.READY, State.DRAINING)

    def move(self, state: State, reason: str) -> None:
        """Come into ``state``, for the log's ``reason``."""
        if state is self.state:
            return
        assert state in NEXT_STATES[self.state], f"a worker cannot go from {self.state.value} to {state.value}"
        before, self.state, self.since = self.state, state, time.time()
        log_transition(self.id, "any", before.value, state, reason)
        self._note_drained()

    def take(self, adapters: AdapterSet) -> None:
        """Count a request in."""
        self.leases[adapters] += 1
        self.in_flight += 1

    def give_back(self, adapters: AdapterSet) -> None:
        """Count a request out."""
        self.in_flight -= 1
        self.leases[adapters] -= 1
        if not self.leases[adapters]:
            del self.leases[adapters]
        self._note_drained()

    def _note_drained(self) -> None:
        if self.state is State.DRAINING and not self.in_flight:
            self.drained.set()
