"""llama-server as a backend: servers that run somewhere already, at one or more URLs."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import aiohttp
from yarl import URL

from loraproxy.backends.base import WorkerExit
from loraproxy.backends.llama_server_api import LlamaServerClient, Loading, ServedAdapter, match, new_session
from loraproxy.backends.llama_server_lifeline import lifeline
from loraproxy.backends.llama_server_places import Place, Places, Reach
from loraproxy.config import WorkerAdapter
from loraproxy.errors import ApiError, InvalidAdapterFile, StartFailed

log = logging.getLogger(__name__)


_STATES = {Reach.UP: "ready", Reach.CHECKING: "starting", Reach.DOWN: "failed"}


@dataclass(frozen=True)
class Retry:
    """Seconds between two attempts to reach a server that is down: doubled each time."""

    first: float = 0.25
    longest: float = 5.0
    loading: float = 0.25
    """While it says that it is loading its model."""
    start: float = 3.0
    """How long a start waits for a server that cannot be reached: it may be starting itself."""


class LlamaServers:
    """What the pool sees as one worker: one or more llama-servers and the requests on them.

    Requests that generate go through :attr:`places`; ``session`` and ``base_url`` are for all others.
    """

    def __init__(self, api_key: str) -> None:
        self.api_key = api_key
        """What the servers want to see of us."""
        self.places = Places()
        self._known: dict[int, str] = {}
        """The paths, as servers list them, of the adapters that the proxy has asked for, by wire id."""
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """Connections to the servers."""
        assert self._session is not None, "the backend was not started"
        return self._session

    @property
    def base_url(self) -> str:
        """A server that is up. Raises Unavailable."""
        return self.places.any_up().client.url

    def states(self) -> Mapping[str, int]:
        """How many servers are in which state, in the words for a worker's."""
        return Counter("draining" if place.leaving else _STATES[place.reach] for place in self.places.all)

    def problem(self) -> str:
        """Why those servers that are down are; empty: none is."""
        return "; ".join(place.why for place in self.places.all if place.reach is Reach.DOWN)

    def _client(self, url: str) -> LlamaServerClient:
        if self._session is None:
            self._session = new_session(self.api_key)
        return LlamaServerClient(self._session, url)

    async def _close(self) -> None:
        if self._session is not None:
            await self._session.close()


async def look_at(client: LlamaServerClient, place: Place) -> None:
    """Find out what ``place`` is: its adapters, slots, and whether it takes ``lora``. Raises ApiError, StartFailed."""
    await client.check_health()
    place.served = await client.adapters()
    place.slots = await client.total_slots()
    place.keyed = bool(place.served) and not await client.takes_lora()
    place.shown = place.intended = None


class UrlServers(LlamaServers):
    """Servers that run already. Each has the adapters that it was started with."""

    def __init__(
        self,
        urls: Sequence[str],
        api_key: str = "",
        *,
        on_adapters: Callable[[tuple[ServedAdapter, ...]], None] = lambda _: None,
        retry: Retry | None = None,
    ) -> None:
        """``on_adapters`` is called with all that the servers list whenever that may have changed."""
        super().__init__(api_key)
        self._urls = tuple(urls)
        self._on_adapters = on_adapters
        self._retry = retry or Retry()
        self._watches: list[asyncio.Task[None]] = []

    @property
    def served(self) -> tuple[ServedAdapter, ...]:
        """The adapters that any of the servers lists, each path once."""
        found = {adapter.path: adapter for place in self.places.all for adapter in reversed(place.served)}
        order = {adapter.path: None for place in self.places.all for adapter in place.served}
        return tuple(found[path] for path in order)

    async def start(self) -> None:
        """Return when one of the servers is ready. Raises StartFailed when none can be reached."""
        tried = []
        for url in self._urls:
            place = Place(self._client(url))
            self.places.all.append(place)
            tried.append(asyncio.Event())
            self._watches.append(asyncio.create_task(self._watch(place, tried[-1])))
        await asyncio.gather(*(event.wait() for event in tried))
        if all(place.reach is not Reach.UP for place in self.places.all):
            raise StartFailed(self.places.down(self.places.all).message)

    async def wait(self) -> WorkerExit:
        """Never: a server that is down is looked after here."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def stop(self, grace: float) -> None:
        """Close the connections; the servers stay as they are."""
        pending = set(self._watches)
        while pending:
            for task in pending:
                task.cancel()
            # before Python 3.12 wait_for may swallow it when what it waits for ends just then
            _, pending = await asyncio.wait(pending, timeout=0.1)
        await self._close()

    async def load_adapter(self, item: WorkerAdapter) -> int:
        """Know an adapter that a server has loaded; 0, as its memory is the server's. Raises InvalidAdapterFile."""
        found = match(self.served, item.path)
        if found is None:
            raise InvalidAdapterFile(not_loaded(str(item.path), self._urls))
        self._known[item.id] = found.path
        for place in self.places.all:
            self._number(place)
        return 0

    async def unload_adapter(self, wire_id: int) -> None:
        """Know it no more."""
        self._known.pop(wire_id, None)
        for place in self.places.all:
            self._number(place)

    def _number(self, place: Place) -> None:
        own = {adapter.path: adapter.id for adapter in reversed(place.served)}
        place.ids = {wire_id: own[path] for wire_id, path in self._known.items() if path in own}

    async def _watch(self, place: Place, tried: asyncio.Event) -> None:
        """Keep ``place`` true for as long as the backend lives."""
        loop = asyncio.get_running_loop()
        delay, give_up = self._retry.first, loop.time() + self._retry.start
        while True:
            began = loop.time()
            try:
                async with lifeline(URL(place.client.url)) as until_lost:
                    await self._look_at(place)
                    tried.set()
                    delay = self._retry.first
                    await until_lost()
                    place.reach = Reach.CHECKING
                if loop.time() - began < self._retry.first:
                    await asyncio.sleep(self._retry.first)
                continue
            except Loading as error:
                self._is_down(place, error.message)
                await asyncio.sleep(self._retry.loading)
                continue
            except OSError as error:
                reason = error.strerror or str(error) or type(error).__name__
                self._is_down(place, f"the llama-server at {place.client.url} cannot be reached: {reason}")
            except ApiError as error:
                self._is_down(place, error.message)
            except StartFailed as error:
                self._is_down(place, str(error))
                tried.set()
            left = give_up - loop.time()
            if left <= 0:
                tried.set()
            await asyncio.sleep(delay if left <= 0 else min(delay, left))
            delay = min(2 * delay, self._retry.longest)

    async def _look_at(self, place: Place) -> None:
        before = place.served
        await look_at(place.client, place)
        self._number(place)
        was, place.reach, place.why = place.reach, Reach.UP, ""
        if was is Reach.DOWN or before != place.served:
            kind = "one adapter set at a time, as it has no lora field" if place.keyed else "any adapter sets"
            log.info(
                "event=up server=%s slots=%d adapters=%d: %s", place.client.url, place.slots, len(place.served), kind
            )
        if [a.path for a in before] != [a.path for a in place.served]:
            self._on_adapters(self.served)
        self.places.pump()

    def _is_down(self, place: Place, why: str) -> None:
        if place.reach is not Reach.DOWN or place.why != why:
            log.warning("event=down server=%s: %s", place.client.url, why)
        place.reach, place.why = Reach.DOWN, why
        self.places.pump()


def not_loaded(path: str, urls: Sequence[str]) -> str:
    """What to do about an adapter that a server at a URL was not started with."""
    return (
        f"the llama-server at {', '.join(urls)} has not loaded {path}; start it with --lora {path}"
        " (and --lora-init-without-apply), or let loraproxy start it: --backend-bin"
    )
