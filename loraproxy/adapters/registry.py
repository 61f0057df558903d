"""The adapters a server knows: names, ids, versions, and the scales used when a request says nothing.

Three identities, each for one purpose. A *name* is what people use. An *id* belongs to a name for as long as the
server runs; llama-server's ``lora`` field and ``/lora-adapters`` speak of it. A *wire id* belongs to one content
of one adapter, a version, and is never used again: the worker knows nothing else, so a request that began under
one version cannot meet another, and nothing that was computed under one (the prompt cache) is taken for another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from loraproxy.adapters.fingerprint import Fingerprint
from loraproxy.adapters.names import check_name, known_names, shorten
from loraproxy.adapters.sets import BASE, AdapterSet
from loraproxy.adapters.tensors import AdapterSummary
from loraproxy.errors import InvalidAdapterFile, InvalidRequest, UnknownAdapter


class Source(str, Enum):
    """Where a registration came from."""

    CONFIGURED = "configured"
    """The command line or the configuration file."""
    FOLDER = "folder"
    """The watched folder."""
    API = "api"
    """A path given to the API; forgotten when the server ends."""
    UPLOAD = "upload"
    """Uploaded through the API; kept."""


@dataclass(frozen=True)
class Version:
    """One content of one adapter, for as long as requests run under it."""

    wire_id: int
    name: str
    path: Path
    summary: AdapterSummary


@dataclass(frozen=True)
class Bound:
    """A request's adapter set, made of the versions that were current when it was bound."""

    adapters: AdapterSet
    """By wire id."""
    versions: tuple[Version, ...] = ()


@dataclass(frozen=True)
class RegisteredAdapter:
    """One adapter as ``GET /adapters`` and llama-server's ``GET /lora-adapters`` show it."""

    id: int
    """Stable: the order of registration, as llama-server numbers ``--lora`` arguments."""
    name: str
    path: Path
    default_scale: float = 0.0
    description: str = ""
    source: Source = Source.CONFIGURED
    version: Version | None = None
    """None: its file cannot be applied, ``error`` says why; or, without an error, it was not read yet."""
    error: str = ""
    seen: Fingerprint = ()
    """What its file was when it was checked."""

    @property
    def is_pending(self) -> bool:
        """It was not read yet."""
        return self.version is None and not self.error


@dataclass
class AdapterRegistry:
    """Adapters by name and by id. Ids count up from 0 in order of registration.

    A default scale of 0 means that a request without a selector does not use the adapter.
    """

    _by_id: dict[int, RegisteredAdapter] = field(default_factory=dict)
    _ids: dict[str, int] = field(default_factory=dict)
    """Of every name there ever was: one that comes back gets its id back."""
    _defaults: AdapterSet = BASE
    _wire_ids: Iterator[int] = field(default_factory=itertools.count)

    def put(
        self,
        name: str,
        path: Path,
        content: AdapterSummary | str | None,
        *,
        source: Source,
        default_scale: float | None = None,
        description: str | None = None,
        seen: Fingerprint = (),
    ) -> RegisteredAdapter:
        """Register an adapter, or replace what its name means for requests from now on.

        content: what its file holds, or the reason why it cannot be applied; None: it was not read yet. None for the
        scale or the description keeps what the name had. The same content under the same path stays the same version.
        Raises InvalidRequest for a bad name or scale.
        """
        defaults = self.check(name, default_scale)
        adapter_id = self._ids.get(name, len(self._ids))
        before = self._by_id.get(adapter_id)
        if default_scale is None:
            default_scale = before.default_scale if before else 0.0
        version = self._version(name, path, content, before) if isinstance(content, AdapterSummary) else None
        adapter = RegisteredAdapter(
            adapter_id,
            name,
            path,
            default_scale,
            (before.description if before else "") if description is None else description,
            source,
            version,
            content if isinstance(content, str) else "",
            seen,
        )
        self._ids[name] = adapter_id
        self._by_id[adapter_id] = adapter
        self._defaults = defaults
        return adapter

    def check(self, name: str, default_scale: float | None) -> AdapterSet:
        """Whether :meth:`put` would take them: the default scales with this one. Raises InvalidRequest."""
        check_name(name)
        adapter_id = self._ids.get(name, len(self._ids))
        before = self._by_id.get(adapter_id)
        if default_scale is None:
            default_scale = before.default_scale if before else 0.0
        return self._defaults_with(adapter_id, name, default_scale)

    def remove(self, name: str) -> RegisteredAdapter:
        """Forget an adapter; its id stays unused until its name comes back. Raises UnknownAdapter."""
        adapter = self.by_name(name)
        self._defaults = self._defaults_with(adapter.id, name, 0.0)
        del self._by_id[adapter.id]
        return adapter

    def bind(self, adapters: AdapterSet) -> Bound:
        """``adapters``, a set of ids, as the versions that are current now.

        Raises UnknownAdapter, and InvalidAdapterFile where an adapter's file cannot be applied.
        """
        versions: dict[int, Version] = {}
        for adapter_id, _ in adapters.entries:
            adapter = self.by_id(adapter_id)
            if adapter.version is None:
                raise InvalidAdapterFile(adapter.error or f"adapter {adapter.name!r} was not read yet")
            versions[adapter_id] = adapter.version
        wire = AdapterSet.of({versions[i].wire_id: scale for i, scale in adapters.entries})
        return Bound(wire, tuple(versions.values()))

    def by_name(self, name: str) -> RegisteredAdapter:
        """The adapter called ``name``. Raises UnknownAdapter with the known names in its message."""
        if name not in self:
            raise UnknownAdapter(f"unknown adapter {shorten(name)}; {known_names(name, self.names())}")
        return self._by_id[self._ids[name]]

    def by_id(self, adapter_id: int) -> RegisteredAdapter:
        """The adapter with this id. Raises UnknownAdapter with the known ids and names in its message."""
        if adapter_id not in self._by_id:
            known = ", ".join(f"{a.id} ({a.name})" for a in itertools.islice(self._by_id.values(), 24))
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
        return isinstance(name, str) and self._ids.get(name) in self._by_id

    def __iter__(self) -> Iterator[RegisteredAdapter]:
        return iter([self._by_id[i] for i in sorted(self._by_id)])

    def __len__(self) -> int:
        return len(self._by_id)

    def _version(self, name: str, path: Path, summary: AdapterSummary, before: RegisteredAdapter | None) -> Version:
        version = before.version if before else None
        if version is not None and version.path == path and version.summary.digest == summary.digest:
            return replace(version, summary=summary)
        return Version(next(self._wire_ids), name, path, summary)

    def _defaults_with(self, adapter_id: int, name: str, scale: float) -> AdapterSet:
        scales: Mapping[int, float] = {**dict(self._defaults.entries), adapter_id: scale}
        try:
            return AdapterSet.of(scales)
        except ValueError:
            raise InvalidRequest(f"the scale of {name!r} must be a finite number, not {scale}") from None
