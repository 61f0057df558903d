"""One worker of the pool: its state and the leases on it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from loraproxy.adapters.sets import AdapterSet
from loraproxy.backends.base import Backend
from loraproxy.pool.residency import Residency


class State(str, Enum):
    """A worker's life: ``starting`` → ``ready`` → ``draining`` → ``stopped``; ``failed`` when it ended by itself."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(eq=False)
class Worker:
    """A backend, its state and how many requests run on it under which adapter set."""

    backend: Backend
    residency: Residency
    state: State = State.STARTING
    leases: Counter[AdapterSet] = field(default_factory=Counter)
    in_flight: int = 0
    """The sum of ``leases``."""

    @property
    def reachable(self) -> bool:
        """It answers requests, new ones or only those it has."""
        return self.state in (State.READY, State.DRAINING)

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
