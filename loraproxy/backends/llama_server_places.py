"""Which llama-server runs a request: one that has its adapters, the one with the most free slots first.

No more requests are sent to a server than it has slots, so that those that wait do so here, where adapter sets take
turns: a flood under one does not hold up another. A server without the ``lora`` field runs one set at a time; it is
drained before it changes, and while a set waits for it no more requests of the one it runs are let in.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum

from loraproxy.adapters.sets import BASE, AdapterSet, WireEntry
from loraproxy.backends.llama_server_api import LlamaServerClient, ServedAdapter
from loraproxy.errors import ApiError, Unavailable

log = logging.getLogger(__name__)


class Reach(Enum):
    """Whether a server can be sent requests."""

    UP = "up"
    CHECKING = "checking"
    """Its connection was lost just now: it may be another server by now."""
    DOWN = "down"


@dataclass(eq=False)
class Place:
    """One server, and what runs on it."""

    client: LlamaServerClient
    reach: Reach = Reach.CHECKING
    why: str = ""
    """Why it is down."""
    slots: int = 1
    keyed: bool = False
    """It has no ``lora`` field: one set at a time."""
    served: tuple[ServedAdapter, ...] = ()
    ids: Mapping[int, int] = field(default_factory=dict)
    """Its own ids, by wire id."""
    leaving: bool = False
    """It finishes what it has and gets nothing new that another can run."""
    running: int = 0
    intended: AdapterSet | None = None
    """Of a keyed server: the set it runs or will next; None: not known."""
    draining: bool = False
    """Of a keyed server: it is to change when what runs has ended."""
    shown: AdapterSet | None = None
    """Of a keyed server: the set that was last set on it."""
    unused: asyncio.Event = field(default_factory=asyncio.Event)
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.unused.set()

    def has(self, adapters: AdapterSet) -> bool:
        """Whether it has loaded all of them."""
        return all(wire_id in self.ids for wire_id, _ in adapters.entries)

    def scales(self, adapters: AdapterSet) -> dict[int, float]:
        """The scale of every adapter it has, by its own ids: 0 for those that are not in the set."""
        return {**{adapter.id: 0.0 for adapter in self.served}, **{self.ids[i]: s for i, s in adapters.entries}}

    def lora(self, adapters: AdapterSet) -> list[WireEntry] | None:
        """The ``lora`` field of a request under ``adapters``; None: it needs none.

        Zeros are said: llama-server applies all adapters at its own scales where the field is absent or empty.
        """
        if self.keyed or not self.served:
            return None
        return [{"id": i, "scale": scale} for i, scale in self.scales(adapters).items()]

    async def become(self, adapters: AdapterSet) -> None:
        """Of a keyed server on which nothing else runs: change to ``adapters``. Raises WorkerFailed, Unavailable."""
        async with self._changing:
            if self.shown == adapters:
                return
            self.shown = None
            scales = self.scales(adapters)
            await self.client.set_scales(scales)
            log.info("event=changed server=%s scales=%s", self.client.url, scales)
            self.shown = adapters

    def drain_for(self, adapters: AdapterSet) -> None:
        """Of a keyed server: another set waits for it; nothing new is let in until what runs has ended."""
        if self.running and self.intended != adapters and not self.draining:
            self.draining = True
            log.info("event=draining server=%s running=%d", self.client.url, self.running)

    def free_for(self, adapters: AdapterSet) -> bool:
        """Whether a request under ``adapters`` may start now."""
        if self.keyed and self.intended != adapters:
            return self.running == 0
        return self.running < self.slots

    def take(self, adapters: AdapterSet) -> None:
        """Count a request in."""
        self.running += 1
        self.unused.clear()
        if self.keyed and self.intended != adapters:
            self.intended = adapters
            self.draining = False

    def give_back(self) -> None:
        """Count a request out."""
        self.running -= 1
        if not self.running:
            self.unused.set()


@dataclass(eq=False)
class _Waiter:
    adapters: AdapterSet
    avoid: Collection[Place]
    granted: asyncio.Future[Place]


class Places:
    """The servers and those that wait for one of them."""

    def __init__(self) -> None:
        self.all: list[Place] = []
        self._queues: OrderedDict[AdapterSet, deque[_Waiter]] = OrderedDict()

    @asynccontextmanager
    async def run(self, adapters: AdapterSet, avoid: Collection[Place] = ()) -> AsyncIterator[Place]:
        """A server that runs one request under ``adapters`` (wire ids) until the block ends.

        ``avoid``: servers that refused it. Raises Unavailable where none that could run it is up, and what
        :meth:`Place.become` raises.
        """
        waiter = _Waiter(adapters, avoid, asyncio.get_running_loop().create_future())
        self._queues.setdefault(adapters, deque()).append(waiter)
        self.pump()
        try:
            place = await waiter.granted
        except asyncio.CancelledError:
            self._give_up(waiter)
            raise
        try:
            if place.keyed:
                await place.become(adapters)
            yield place
        finally:
            place.give_back()
            self.pump()

    def any_up(self) -> Place:
        """A server for a request that runs under no adapter set; the one with the most free slots.

        Raises Unavailable.
        """
        up = [place for place in self.all if place.reach is Reach.UP and not place.leaving]
        if not up:
            raise self.down(self.all)
        return max(up, key=_free_share)

    def pump(self) -> None:
        """Let in whoever may: sets in turns, those of one set in order of arrival."""
        progress = True
        while progress:
            progress = False
            held: set[Place] = set()
            for adapters in list(self._queues):
                queue = self._queues[adapters]
                let_in = self._let_in(queue, held)
                if not queue:
                    del self._queues[adapters]
                    continue
                for place in self.all:
                    if place.keyed and place.has(adapters):
                        held.add(place)
                        place.drain_for(adapters)
                if let_in:
                    self._queues.move_to_end(adapters)
                    progress = True

    def _let_in(self, queue: deque[_Waiter], held: Collection[Place]) -> bool:
        """One turn of one set: one request, or as many as a keyed server takes, since a change costs."""
        let_in = False
        while queue:
            waiter = queue[0]
            able = [p for p in self.all if p.has(waiter.adapters) and p not in waiter.avoid]
            hopeless = all(place.reach is Reach.DOWN for place in able)
            place = None if hopeless else _best(able, waiter.adapters, held)
            if place is None and not hopeless and not waiter.granted.done():
                break
            queue.popleft()
            if waiter.granted.done():  # its client is gone
                continue
            if place is None:
                waiter.granted.set_exception(self.down(able) if able else self._without(waiter.adapters))
                continue
            place.take(waiter.adapters)
            waiter.granted.set_result(place)
            let_in = True
            if not place.keyed:
                break
        return let_in

    def down(self, places: Sequence[Place]) -> Unavailable:
        """The error that tells why none of ``places`` runs anything."""
        reasons = "; ".join(place.why or f"the llama-server at {place.client.url} is being checked" for place in places)
        return Unavailable(reasons or "there is no llama-server", retry_after=2)

    def _without(self, adapters: AdapterSet) -> ApiError:
        if adapters == BASE:
            return self.down(self.all)
        return Unavailable("no llama-server has these adapters any more; try again", retry_after=1)

    def _give_up(self, waiter: _Waiter) -> None:
        queue = self._queues.get(waiter.adapters)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._queues[waiter.adapters]
        elif waiter.granted.done() and not waiter.granted.cancelled() and not waiter.granted.exception():
            waiter.granted.result().give_back()
        self.pump()


def _best(able: Sequence[Place], adapters: AdapterSet, held: Collection[Place]) -> Place | None:
    """Of those that could run it, one that may start it now."""
    free = [p for p in able if p.reach is Reach.UP and p not in held and p.free_for(adapters)]
    staying = [place for place in free if not place.leaving] or free
    return max(staying, key=lambda place: (place.intended == adapters, _free_share(place)), default=None)


def _free_share(place: Place) -> float:
    return 1.0 - place.running / place.slots
