"""One keyed worker: its state, its adapter set, the leases on it, and what it is drained for."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from loraproxy.adapters.registry import Bound, Version
from loraproxy.adapters.sets import BASE, AdapterSet
from loraproxy.backends.base import KeyedBackend
from loraproxy.pool.worker import NEXT_STATES, State

BASE_BOUND = Bound(BASE)
"""The base model without adapters."""


def label(bound: Bound) -> str:
    """The set as the ``X-LoRA`` header shows it; empty for the base."""
    return bound.adapters.label({version.wire_id: version.name for version in bound.versions})


def named(bound: Bound) -> str:
    """The set for logs and messages."""
    return label(bound) or "base"


@dataclass(eq=False)
class KeyedWorker:
    """A backend that runs one adapter set at a time; times are the pool's clock's, in seconds."""

    id: int
    backend: KeyedBackend
    bound: Bound
    """The set it runs, or is being given while it is ``starting``."""
    slots: int
    memory: int
    """An estimate of what it takes beside the base model's file, in bytes."""
    has: Bound = BASE_BOUND
    """The set it runs until it was changed."""
    state: State = State.STARTING
    since: float = field(default_factory=time.time)
    """When it came into its state, in seconds since the epoch."""
    up: bool = False
    """Its process answers."""
    in_flight: int = 0
    goal: Bound | None = None
    """What it is drained for; None while it is draining: its end."""
    leaving: str = ""
    """Why it is to be drained and ended; empty: it is not."""
    replaces: bool = False
    """One before it failed in its place."""
    ready_at: float = 0.0
    idle_since: float = 0.0
    turn_at: float = 0.0
    """When its turn began: others have waited since, or it has had its set since."""
    turn_leases: int = 0
    """How many leases it gave in its turn."""
    ordered: asyncio.Event = field(default_factory=asyncio.Event)
    """It is drained, and its task is to go on."""

    @property
    def key(self) -> AdapterSet:
        """The adapter set by wire ids: another version or scale is another key."""
        return self.bound.adapters

    @property
    def free(self) -> int:
        """Leases it can give now."""
        return self.slots - self.in_flight if self.state is State.READY else 0

    @property
    def reachable(self) -> bool:
        """It answers requests that do not generate."""
        return self.up and self.state not in (State.FAILED, State.STOPPED)

    @property
    def is_ending(self) -> bool:
        """It is on its way out."""
        return self.state in (State.FAILED, State.STOPPED) or (self.state is State.DRAINING and self.goal is None)

    @property
    def is_as_good_as_gone(self) -> bool:
        """Likewise, and no request holds that up."""
        return self.is_ending and not (self.state is State.DRAINING and self.in_flight)

    def holds(self, version: Version) -> bool:
        """It runs ``version``, is being given it or is drained for it."""
        bounds = (self.has, self.bound, self.goal or BASE_BOUND)
        return any(v.wire_id == version.wire_id for bound in bounds for v in bound.versions)

    def take(self) -> None:
        """Count a request in."""
        assert self.free > 0, "a lease on a worker that gives none"
        self.in_flight += 1
        self.turn_leases += 1

    def give_back(self, now: float) -> None:
        """Count a request out."""
        self.in_flight -= 1
        self.idle_since = now

    def begin_turn(self, now: float) -> None:
        """Its turn begins."""
        self.turn_at, self.turn_leases = now, 0

    def move(self, state: State) -> State:
        """Come into ``state``; the one before."""
        before = self.state
        assert state in NEXT_STATES[before], f"a worker cannot go from {before.value} to {state.value}"
        assert state is not State.STARTING or not self.in_flight, "a change under a running request"
        self.state, self.since = state, time.time()
        return before
