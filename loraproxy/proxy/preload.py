"""What ``--preload`` names: sets that have a worker at all times, or adapters that a shared worker loads first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loraproxy.adapters.names import RESERVED, known_names, shorten
from loraproxy.adapters.registry import AdapterRegistry, Bound, Source, Version
from loraproxy.adapters.sets import BASE, AdapterSet
from loraproxy.errors import InvalidAdapterFile, StartFailed
from loraproxy.proxy.catalog import Catalog


def check_names(names: Sequence[str], registry: AdapterRegistry) -> None:
    """Raises StartFailed for a name that nothing has."""
    for name in names:
        if name not in registry and name not in RESERVED:
            raise StartFailed(f"--preload: unknown adapter {shorten(name)}; {known_names(name, registry.names())}")


def kept_warm(registry: AdapterRegistry, names: Sequence[str]) -> Callable[[], list[Bound]]:
    """The sets that ``names`` mean whenever it is asked, each at scale 1; names that mean nothing then are left out."""

    def bounds() -> list[Bound]:
        found = []
        for name in names:
            if name in RESERVED:
                found.append(Bound(BASE))
            elif name in registry:
                try:
                    found.append(registry.bind(AdapterSet.of({registry.by_name(name).id: 1.0})))
                except InvalidAdapterFile:
                    continue  # its file cannot be applied as it is now
        return found

    return bounds


async def loaded_first(catalog: Catalog, names: Sequence[str]) -> list[Version]:
    """What a shared worker loads before the first request: ``names``, then the adapters configured by name.

    Raises StartFailed where one of ``names`` cannot be applied.
    """
    registry = catalog.registry
    found: dict[str, Version] = {}
    for name in names:
        if name in RESERVED:
            continue  # the base model is always there
        await catalog.retry(registry.by_name(name))
        adapter = registry.by_name(name)
        if adapter.version is None:
            raise StartFailed(f"--preload: {adapter.error}")
        found[name] = adapter.version
    for adapter in registry:
        if adapter.source is Source.CONFIGURED and adapter.version is not None:
            found.setdefault(adapter.name, adapter.version)
    return list(found.values())
