"""Which adapters are loaded in one worker: on demand, within a budget, the least recently used leaving first.

A request takes all adapters of its set at once or waits for all of them, so that no two requests can each hold
what the other waits for. Those that wait for memory do so in order of arrival. Requests whose adapters are all
there may pass them, since they need no memory, but only so often: else the adapters they hold would never leave.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from loraproxy.adapters.fingerprint import Fingerprint, fingerprint
from loraproxy.adapters.registry import Version
from loraproxy.errors import ApiError, InvalidAdapterFile, InvalidRequest, WorkerFailed

log = logging.getLogger(__name__)

MAX_OVERTAKEN = 32
"""How many requests may pass one that waits for memory."""


class Loader(Protocol):
    """What loads adapters into the worker and reports on it."""

    async def load(self, version: Version) -> int:
        """Load; the bytes it takes. Raises ApiError."""
        ...

    async def unload(self, version: Version, *, evicted: bool) -> None:
        """Return when the memory is free. ``evicted``: to make room. Raises nothing but CancelledError."""
        ...


@dataclass(eq=False)
class _Resident:
    """An adapter that is loaded or being loaded."""

    version: Version
    nbytes: int
    """The estimate until it is loaded, then what it takes."""
    last_used: int
    leases: int = 0
    loading: asyncio.Task[None] = field(init=False)

    @property
    def is_loaded(self) -> bool:
        return self.loading.done()


class _LargerThanThought(Exception):
    """A loaded adapter had no room among those in use and left again; its size is known now."""


@dataclass(eq=False)
class _Waiter:
    """A request that waits for memory."""

    versions: tuple[Version, ...]
    granted: asyncio.Future[list[_Resident]]
    overtaken: int = 0


class Residency:
    """The loaded adapters of one worker; ``budget`` bytes of them, 0: no limit."""

    def __init__(self, loader: Loader, budget: int) -> None:
        self._loader = loader
        self.budget = budget
        self._residents: dict[int, _Resident] = {}
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._waiters: deque[_Waiter] = deque()
        self._failed: dict[int, tuple[Fingerprint, InvalidAdapterFile]] = {}
        self._sizes: dict[int, int] = {}
        self._clock = itertools.count()
        self._closed: ApiError | None = None
        self.nbytes = 0
        """Bytes of the adapters that are loaded or being loaded."""

    @property
    def waiting(self) -> int:
        """Requests that wait for memory."""
        return len(self._waiters)

    def state(self, version: Version) -> str:
        """``resident``, ``loading`` or ``registered`` (not loaded)."""
        resident = self._residents.get(version.wire_id)
        if resident is None:
            return "registered"
        return "resident" if resident.is_loaded else "loading"

    def failure(self, version: Version) -> str:
        """Why its load failed, where it would fail again; else empty."""
        known = self._failed.get(version.wire_id)
        return known[1].message if known else ""

    @asynccontextmanager
    async def hold(self, versions: Sequence[Version]) -> AsyncIterator[None]:
        """Until the block ends ``versions`` are loaded and stay so.

        Raises InvalidRequest where they never fit the budget, InvalidAdapterFile, AdapterChanged, and what ended the
        worker meanwhile.
        """
        wanted = tuple(versions)
        if not wanted:
            yield
            return
        residents = await self._hold_loaded(wanted)
        try:
            yield
        finally:
            self._give_back(residents)

    async def remove(self, version: Version) -> None:
        """Unload a version that nobody holds or waits for."""
        resident = self._residents.get(version.wire_id)
        if resident is not None:
            if not resident.is_loaded:
                await asyncio.wait({resident.loading})
            if self._residents.get(version.wire_id) is resident and not resident.leases:
                self._leave(resident, evicted=False)
                self._pump()
        if (leaving := self._leaving.get(version.wire_id)) is not None:
            await asyncio.wait({leaving})
        self._failed.pop(version.wire_id, None)
        self._sizes.pop(version.wire_id, None)

    async def close(self, error: ApiError) -> None:
        """The worker is gone: those that wait fail with ``error``."""
        self._closed = error
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.granted.done():
                waiter.granted.set_exception(error)
        tasks = {r.loading for r in self._residents.values()} | set(self._leaving.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # -- taking and giving back ----------------------------------------------------------------------------

    def _check(self, versions: tuple[Version, ...]) -> None:
        if self._closed is not None:
            raise self._closed
        need = sum(self._size(version) for version in versions)
        if self.budget and need > self.budget:
            raise InvalidRequest(
                f"{' and '.join(repr(v.name) for v in versions)} need {_mib(need)} of memory, more than the"
                f" {_mib(self.budget)} for all loaded adapters (--adapter-memory)"
            )
        for version in versions:
            if version.wire_id in self._failed:
                seen, error = self._failed[version.wire_id]
                if seen == fingerprint(version.path):
                    raise InvalidAdapterFile(error.message)
                del self._failed[version.wire_id]

    async def _hold_loaded(self, wanted: tuple[Version, ...]) -> list[_Resident]:
        while True:
            self._check(wanted)
            residents = self._take_or_none(wanted) or await self._wait(wanted)
            try:
                await self._loaded(residents)
            except _LargerThanThought:
                self._give_back(residents)  # and again, now that its size is known
            except BaseException:
                self._give_back(residents)
                raise
            else:
                return residents

    def _size(self, version: Version) -> int:
        """What it takes: known once it was loaded, before that an estimate."""
        return self._sizes.get(version.wire_id, version.summary.resident_bytes)

    async def _loaded(self, residents: list[_Resident]) -> None:
        if pending := [resident.loading for resident in residents if not resident.is_loaded]:
            await asyncio.wait(pending)
        for resident in residents:
            if resident.loading.cancelled():  # by close()
                raise self._closed or WorkerFailed("the load of an adapter was given up; try again")
            resident.loading.result()

    def _take_or_none(self, versions: tuple[Version, ...]) -> list[_Resident] | None:
        """Take them now, if that is fair and they fit."""
        if self._waiters:
            first = self._waiters[0]
            if first.overtaken >= MAX_OVERTAKEN or any(v.wire_id not in self._residents for v in versions):
                return None
            first.overtaken += 1
        return self._take(versions)

    def _take(self, versions: tuple[Version, ...]) -> list[_Resident] | None:
        missing = [v for v in versions if v.wire_id not in self._residents]
        need = sum(self._size(version) for version in missing)
        if missing and not self._make_room(need, {version.wire_id for version in versions}):
            return None
        after = tuple(self._leaving.values())
        for version in missing:
            resident = _Resident(version, self._size(version), next(self._clock))
            self._residents[version.wire_id] = resident
            self.nbytes += resident.nbytes
            resident.loading = asyncio.create_task(self._load(resident, after))
            resident.loading.add_done_callback(self._load_ended)
        residents = [self._residents[version.wire_id] for version in versions]
        for resident in residents:
            resident.leases += 1
        return residents

    def _give_back(self, residents: Iterable[_Resident]) -> None:
        for resident in residents:
            resident.leases -= 1
            resident.last_used = next(self._clock)
        self._pump()

    async def _wait(self, versions: tuple[Version, ...]) -> list[_Resident]:
        waiter = _Waiter(versions, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._pump()
            elif waiter.granted.done() and not waiter.granted.cancelled() and not waiter.granted.exception():
                self._give_back(waiter.granted.result())
            raise

    def _pump(self) -> None:
        """Serve those that wait, in order, as far as memory goes."""
        while self._waiters and self._closed is None:
            residents = self._take(self._waiters[0].versions)
            if residents is None:
                return
            waiter = self._waiters.popleft()
            if waiter.granted.cancelled():
                self._give_back(residents)
            else:
                waiter.granted.set_result(residents)

    # -- coming and going ----------------------------------------------------------------------------------

    def _make_room(self, need: int, spared: set[int]) -> bool:
        """Evict until ``need`` bytes are free; nothing is evicted where that is not possible."""
        if not self.budget:
            return True
        idle = sorted(
            (r for i, r in self._residents.items() if not r.leases and r.is_loaded and i not in spared),
            key=lambda resident: resident.last_used,
        )
        excess = self.nbytes + need - self.budget
        if excess > sum(resident.nbytes for resident in idle):
            return False
        for resident in idle:
            if excess <= 0:
                break
            excess -= resident.nbytes
            self._leave(resident, evicted=True)
        return True

    def _leave(self, resident: _Resident, *, evicted: bool) -> None:
        wire_id = resident.version.wire_id
        del self._residents[wire_id]
        self.nbytes -= resident.nbytes
        task = asyncio.create_task(self._loader.unload(resident.version, evicted=evicted))
        self._leaving[wire_id] = task
        task.add_done_callback(lambda _: self._leaving.pop(wire_id, None))
        task.add_done_callback(_look_at)

    async def _load(self, resident: _Resident, after: tuple[asyncio.Task[None], ...]) -> None:
        """Load once those that make room for it have left."""
        version = resident.version
        try:
            if after:
                await asyncio.wait(after)
            seen = fingerprint(version.path)
            try:
                nbytes = await self._loader.load(version)
            except InvalidAdapterFile as error:
                self._failed[version.wire_id] = (seen, error)
                raise
        except BaseException:
            del self._residents[version.wire_id]
            self.nbytes -= resident.nbytes
            raise
        self.nbytes += nbytes - resident.nbytes
        resident.nbytes = nbytes
        self._sizes[version.wire_id] = nbytes
        if not self._make_room(0, {version.wire_id}):
            self._leave(resident, evicted=True)
            raise _LargerThanThought

    def _load_ended(self, task: asyncio.Task[None]) -> None:
        _look_at(task)
        self._pump()  # it may leave for others now, or has left its room to them


def _look_at(task: asyncio.Task[None]) -> None:
    """An error that nobody waited for is no fault of the program."""
    if not task.cancelled():
        task.exception()


def _mib(nbytes: int) -> str:
    return f"{nbytes / 1024**2:.1f} MiB"
