"""What the pool asks of a backend: something to start, reach over HTTP and stop."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import aiohttp

from loraproxy.adapters.registry import Bound
from loraproxy.config import WorkerAdapter


@dataclass(frozen=True)
class WorkerExit:
    """How a worker process ended: its return code (negative: the signal that killed it) and what it said last."""

    returncode: int
    last_lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.returncode < 0:
            try:
                name = signal.Signals(-self.returncode).name
            except ValueError:
                name = f"signal {-self.returncode}"
            return f"killed by {name}"
        return f"exit code {self.returncode}"

    def report(self) -> str:
        """How it ended and why: the ``error:`` line it left, else its last lines."""
        for line in reversed(self.last_lines):
            if line.startswith("error: "):
                return f"{self}: {line.removeprefix('error: ')}"
        return "\n  ".join((f"{self}", *self.last_lines[-8:]))


class Backend(Protocol):
    """One worker that speaks llama-server's HTTP API."""

    @property
    def session(self) -> aiohttp.ClientSession:
        """Where to send requests; only between ``start`` and ``stop``."""
        ...

    @property
    def base_url(self) -> str:
        """What paths are appended to, without a trailing slash."""
        ...

    async def start(self) -> None:
        """Return when it answers ``/health`` with 200. Raises StartFailed when it cannot."""
        ...

    async def wait(self) -> WorkerExit:
        """Return when it has ended by itself."""
        ...

    async def stop(self, grace: float) -> None:
        """End it and remove what it left behind; after ``grace`` seconds by force. May be called in any state."""
        ...


class KeyedBackend(Backend, Protocol):
    """A worker that runs one adapter set at a time: the base model's, empty, when it was started."""

    async def change(self, bound: Bound) -> None:
        """Return when it runs ``bound``, and nothing else. Nothing may run on it: it is drained before.

        Raises InvalidAdapterFile and AdapterChanged for an adapter, Conflict where a request still runs: it then runs
        what it ran before; WorkerFailed where the worker ended or could not change: end it.
        """
        ...


@runtime_checkable
class Group(Protocol):
    """A backend of several servers, which the pool sees as one worker."""

    def states(self) -> Mapping[str, int]:
        """How many of them are in which state, in the words for a worker's."""
        ...

    def problem(self) -> str:
        """What is wrong with those that do not serve; empty: all do."""
        ...


@runtime_checkable
class AdapterHost(Protocol):
    """A backend that sees to its adapters itself, where others are asked over HTTP (``/internal/adapters``)."""

    async def load_adapter(self, item: WorkerAdapter) -> int:
        """Return when requests can run under it; the bytes it takes. Raises InvalidAdapterFile and ServerError."""
        ...

    async def unload_adapter(self, wire_id: int) -> None:
        """No request will ask for it any more."""
        ...
