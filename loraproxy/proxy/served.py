"""The adapters of llama-servers at URLs: what they list is what there is, under names of ours."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loraproxy.adapters.names import RESERVED, check_name
from loraproxy.adapters.registry import AdapterRegistry, Source
from loraproxy.adapters.tensors import AdapterSummary
from loraproxy.backends.llama_server import UrlServers, not_loaded
from loraproxy.backends.llama_server_api import LlamaServerClient, ServedAdapter, match
from loraproxy.backends.llama_server_places import Reach
from loraproxy.config import Config
from loraproxy.errors import ApiError, InvalidAdapterFile, InvalidRequest, StartFailed
from loraproxy.proxy.catalog import Catalog, Surveyed

log = logging.getLogger(__name__)


@dataclass
class ServedAdapters:
    """What the servers listed last, and the names of it; in the place of checks of files."""

    urls: Sequence[str]
    base_names: frozenset[str]
    served: tuple[ServedAdapter, ...] = ()
    wanted: dict[str, Path] = field(default_factory=dict)
    """Names from the configuration, and the paths that were given with them."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def update(self, served: tuple[ServedAdapter, ...]) -> None:
        """The servers list ``served`` now."""
        if [adapter.path for adapter in served] != [adapter.path for adapter in self.served]:
            self.served = served
            self.changed.set()

    def name(self, name: str) -> str:
        """``name`` if an adapter may bear it. Raises InvalidRequest."""
        check_name(name)
        if name in self.base_names:
            raise InvalidRequest(f"{name!r} names the base model, too; give the adapter another name")
        return name

    def survey_or_reason(self, name: str, path: Path) -> Surveyed:
        """The adapter that a server loaded from ``path``, or why there is none. Raises InvalidRequest for the name."""
        self.name(name)
        found = self.match(path)
        if found is None:
            return Surveyed(f"adapter {name!r}: {not_loaded(str(path), self.urls)}", ())
        return Surveyed(_summary(name, found), ())

    def read(self, name: str, path: Path) -> AdapterSummary:
        """Raises InvalidAdapterFile, as :meth:`check_upload`."""
        raise _takes_no_files(name)

    def check_upload(self, name: str) -> None:
        """Raises InvalidAdapterFile: a server at a URL cannot be given a file."""
        raise _takes_no_files(name)

    def match(self, path: Path) -> ServedAdapter | None:
        """What the servers loaded from ``path``."""
        return match(self.served, path)

    def names(self) -> dict[str, ServedAdapter]:
        """A name for each: the configured one, else the file's, made unique. Raises StartFailed, InvalidRequest."""
        named: dict[str, ServedAdapter] = {}
        for name, path in self.wanted.items():
            if (found := self.match(path)) is not None:
                named[self.name(name)] = found
        taken = {adapter.path for adapter in named.values()}
        for adapter in self.served:
            if adapter.path not in taken:
                name = _free_name(adapter.stem, named.keys() | self.wanted.keys() | self.base_names | RESERVED)
                named[name] = adapter
        return named

    def register(self, registry: AdapterRegistry, config: Config) -> None:
        """The start: all that is listed. Raises StartFailed for a configured one that is not."""
        self.wanted = {name: adapter.path for name, adapter in config.adapters.items()}
        for name, path in self.wanted.items():
            if self.match(path) is None:
                raise StartFailed(f"adapter {name!r}: {not_loaded(str(path), self.urls)}")
        try:
            for name, adapter in self.names().items():
                known = config.adapters.get(name)
                registry.put(
                    name,
                    Path(adapter.path),
                    _summary(name, adapter),
                    source=Source.CONFIGURED,
                    default_scale=known.scale if known else None,
                    description=known.description if known else None,
                )
                log.info("adapter %s: %s", name, adapter.path)
        except InvalidRequest as error:
            raise StartFailed(error.message) from error

    async def follow(self, catalog: Catalog) -> None:
        """Keep the catalog as the servers list it, until cancelled."""
        while True:
            await self.changed.wait()
            self.changed.clear()
            names = self.names()
            for gone in [a.name for a in catalog.registry if a.name not in names]:
                await catalog.remove(gone)
            for name, adapter in names.items():
                await catalog.register(name, Path(adapter.path), Source.CONFIGURED)


async def look(urls: Sequence[str], api_key: str) -> tuple[tuple[ServedAdapter, ...], frozenset[str]]:
    """What the servers at ``urls`` list and what they call their model, once one of them is ready.

    Raises StartFailed where none is reached.
    """
    servers = UrlServers(urls, api_key)
    try:
        await servers.start()
        names = [await _names(place.client) for place in servers.places.all if place.reach is Reach.UP]
        return servers.served, frozenset(name for found in names for name in found)
    finally:
        await servers.stop(0)


async def _names(client: LlamaServerClient) -> tuple[str, ...]:
    try:
        return await client.names()
    except ApiError as error:
        log.warning("%s", error.message)
        return ()


def _takes_no_files(name: str) -> InvalidAdapterFile:
    return InvalidAdapterFile(
        f"adapter {name!r}: a llama-server at a URL cannot be given files; start it with --lora FILE, or let"
        " loraproxy start it: --backend-bin"
    )


def _summary(name: str, adapter: ServedAdapter) -> AdapterSummary:
    digest = hashlib.sha256(adapter.path.encode("utf-8", "surrogateescape")).hexdigest()
    return AdapterSummary(name, Path(adapter.path), digest, "gguf", 0, (0, 0), (), 0)


def _free_name(stem: str, taken: Collection[str]) -> str:
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:60] or "lora"
    name, number = base, 2
    while name in taken or name.lower() in RESERVED:
        name, number = f"{base}-{number}", number + 1
    return name
