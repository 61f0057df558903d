"""The watched folder: what appears, changes or goes there does so in the catalog. And files elsewhere that change.

Both are polled, as no notification works on every file system. What changed is taken up when it has stayed the
same from one look to the next, so that a file is not read while it is being written.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from loraproxy.adapters.fingerprint import Fingerprint, fingerprint
from loraproxy.adapters.folder import Listing, list_folder
from loraproxy.adapters.registry import Source
from loraproxy.proxy.catalog import Catalog

log = logging.getLogger(__name__)

_INTERVAL = 0.4
_BY_PATH = (Source.CONFIGURED, Source.API)
_LARGEST_SHARE = 0.05
"""Of the time, for looking: a slow folder is looked at less often."""


class Watcher:
    """Keeps the catalog as the folder is."""

    def __init__(self, catalog: Catalog, folder: Path, known: Listing, interval: float = _INTERVAL) -> None:
        """``known``: what was there at the start, which the catalog has already."""
        self._catalog = catalog
        self._folder = folder
        self._interval = interval
        self._before = known
        self._taken: dict[str, Fingerprint] = {name: found.fingerprint for name, found in known.adapters.items()}
        """What the catalog was last told, by name."""
        self._unreadable = ""
        self.problems: dict[str, str] = {}
        """Entries that are no adapters to register: path and reason."""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            began = time.monotonic()
            listing = await self._catalog.in_background(self._look)
            took = time.monotonic() - began
            if listing is not None:
                try:
                    await self._apply(listing)
                except Exception:
                    log.exception("adapters folder %s: a change could not be taken up", self._folder)
            await asyncio.sleep(max(self._interval, took / _LARGEST_SHARE))

    def _look(self) -> Listing | None:
        try:
            listing = list_folder(self._folder, self._catalog.checks.name)
        except OSError as error:
            reason = error.strerror or str(error)
            if reason != self._unreadable:  # an unmounted disk is no reason to forget what is loaded from it
                log.error("adapters folder %s: %s; its adapters stay as they are", self._folder, reason)
            self._unreadable = reason
            return None
        self._unreadable = ""
        return listing

    async def _apply(self, listing: Listing) -> None:
        before, self._before = self._before, listing
        problems = {path: p.reason for path, p in listing.problems.items() if before.problems.get(path) == p}
        for name, found in listing.adapters.items():
            if before.adapters.get(name) != found:
                continue  # it may still be growing
            adapter = self._catalog.present(name)
            if adapter is not None and adapter.source is not Source.FOLDER and adapter.path != found.path:
                problems[str(found.path)] = f"the name {name!r} is taken ({adapter.source.value}: {adapter.path})"
                self._taken.pop(name, None)
            elif adapter is None or self._taken.get(name) != found.fingerprint:
                self._taken[name] = found.fingerprint
                source = adapter.source if adapter else Source.FOLDER
                await self._catalog.register_or_fail(name, found.path, source)
        for name in [name for name in self._taken if name not in listing.adapters and name not in before.adapters]:
            del self._taken[name]
            await self._catalog.remove_from_folder(name)
        self._report(problems)

    def _report(self, problems: dict[str, str]) -> None:
        for path, reason in problems.items():
            if self.problems.get(path) != reason:
                log.warning("adapters folder: %s is left alone: %s", path, reason)
        self.problems.clear()
        self.problems.update(problems)


class Follower:
    """Takes up the files of adapters registered by path, on the command line or over the API, that are written anew.

    They would otherwise go on in their old version for as long as that stays loaded, and in the new one after that.
    """

    def __init__(self, catalog: Catalog, interval: float = _INTERVAL) -> None:
        self._catalog = catalog
        self._interval = interval
        self._before: dict[str, Fingerprint] = {}
        self._refused: dict[str, Fingerprint] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            began = time.monotonic()
            paths = [(a.name, a.path) for a in self._catalog.registry if a.source in _BY_PATH and a.version is not None]
            found = await self._catalog.in_background(partial(_fingerprints, paths))
            took = time.monotonic() - began
            try:
                await self._apply(found)
            except Exception:
                log.exception("the change of an adapter's file could not be taken up")
            await asyncio.sleep(max(self._interval, took / _LARGEST_SHARE))

    async def _apply(self, found: dict[str, Fingerprint]) -> None:
        before, self._before = self._before, found
        for name, seen in found.items():
            adapter = self._catalog.present(name)
            if adapter is None or seen in ((), adapter.seen, self._refused.get(name)) or before.get(name) != seen:
                continue
            if reason := await self._catalog.take_up(name):
                self._refused[name] = seen
                log.warning("adapter %s stays as it was registered; its file has changed, but: %s", name, reason)


def _fingerprints(paths: Sequence[tuple[str, Path]]) -> dict[str, Fingerprint]:
    return {name: fingerprint(path) for name, path in paths}
