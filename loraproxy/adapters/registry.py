"""The adapters a server knows: names, ids on the wire, files, and the scales used when a request says nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from loraproxy.adapters.names import check_name, known_names, shorten
from loraproxy.adapters.sets import BASE, AdapterSet
from loraproxy.errors import InvalidRequest, UnknownAdapter


@dataclass(frozen=True)
class RegisteredAdapter:
    """One adapter as llama-server's ``GET /lora-adapters`` knows it: id, name, file, current default scale."""

    id: int
    """Stable: the order of registration, as llama-server numbers ``--lora`` arguments."""
    name: str
    path: Path
    default_scale: float = 0.0
    digest: str = ""
    """Hex SHA-256 of the content once it was read, else empty."""


class AdapterRegistry:
    """Adapters by name and by id. Ids count up from 0 in order of registration.

    A default scale of 0 means that a request without a selector does not use the adapter.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, RegisteredAdapter] = {}
        self._ids: dict[str, int] = {}
        self._next_id = 0
        self._defaults: AdapterSet = BASE

    def add(self, name: str, path: Path, *, default_scale: float = 0.0, digest: str = "") -> RegisteredAdapter:
        """Register an adapter under the next id. Raises InvalidRequest for a bad or used name or a bad scale."""
        check_name(name)
        if name in self._ids:
            raise InvalidRequest(f"the adapter name {name!r} is used twice; give each adapter its own NAME=PATH")
        scales = dict(self._defaults.entries)
        scales[self._next_id] = default_scale
        try:
            defaults = AdapterSet.of(scales)
        except ValueError:
            raise InvalidRequest(f"the scale of {name!r} must be a finite number, not {default_scale}") from None
        adapter = RegisteredAdapter(self._next_id, name, path, default_scale, digest)
        self._by_id[adapter.id] = adapter
        self._ids[name] = adapter.id
        self._next_id += 1
        self._defaults = defaults
        return adapter

    def set_digest(self, name: str, digest: str) -> None:
        """Note the digest of an adapter's content. Raises UnknownAdapter."""
        adapter = self.by_name(name)
        self._by_id[adapter.id] = replace(adapter, digest=digest)

    def by_name(self, name: str) -> RegisteredAdapter:
        """The adapter called ``name``. Raises UnknownAdapter with the known names in its message."""
        if name not in self._ids:
            raise UnknownAdapter(f"unknown adapter {shorten(name)}; {known_names(name, self._ids)}")
        return self._by_id[self._ids[name]]

    def by_id(self, adapter_id: int) -> RegisteredAdapter:
        """The adapter with this id. Raises UnknownAdapter with the known ids and names in its message."""
        if adapter_id not in self._by_id:
            known = ", ".join(f"{i} ({a.name})" for i, a in list(self._by_id.items())[:24])
            raise UnknownAdapter(
                f"unknown adapter id {shorten(adapter_id)}; "
                + (f"known ids: {known}" if known else "no adapters are loaded")
            )
        return self._by_id[adapter_id]

    def names(self) -> tuple[str, ...]:
        """All names, in order of their ids."""
        return tuple(adapter.name for adapter in self)

    def names_by_id(self) -> dict[int, str]:
        """Id to name, as :meth:`AdapterSet.label` wants it."""
        return {adapter.id: adapter.name for adapter in self}

    def default_set(self) -> AdapterSet:
        """What a request without any selector runs under."""
        return self._defaults

    def set_defaults(self, defaults: AdapterSet) -> None:
        """Replace the default scales, as ``POST /lora-adapters`` does: adapters not in ``defaults`` get 0.

        Raises UnknownAdapter, and changes nothing, if one of the ids is not known.
        """
        scales = dict(defaults.entries)
        for adapter_id in scales:
            self.by_id(adapter_id)
        self._by_id = {i: replace(a, default_scale=scales.get(i, 0.0)) for i, a in self._by_id.items()}
        self._defaults = defaults

    def __contains__(self, name: object) -> bool:
        return name in self._ids

    def __iter__(self) -> Iterator[RegisteredAdapter]:
        return iter(tuple(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)
