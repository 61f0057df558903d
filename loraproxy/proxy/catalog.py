"""Adapters come, change and go while requests run: every way there is ends here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

from loraproxy.adapters.background import background_threads
from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.fingerprint import Fingerprint, fingerprint
from loraproxy.adapters.names import check_name
from loraproxy.adapters.read import Unsupported, read_adapter, survey_adapter
from loraproxy.adapters.registry import AdapterRegistry, RegisteredAdapter, Source, Version
from loraproxy.adapters.tensors import AdapterSummary
from loraproxy.adapters.uploads import About, UploadFolder
from loraproxy.errors import Conflict, InvalidAdapterFile, InvalidRequest, ServerError, Unavailable
from loraproxy.pool.base import Pool

log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 5.0
_REST = 3.0
"""While requests run, reading what nobody asked for yet rests this many times as long as it takes."""


@dataclass(frozen=True)
class Wish:
    """What a registration is to have beside its file; None keeps what the name had."""

    scale: float | None = None
    description: str | None = None

    def about(self, name: str, before: RegisteredAdapter | None) -> About:
        """With what the name had where nothing is wished."""
        scale = (before.default_scale if before else 0.0) if self.scale is None else self.scale
        text = (before.description if before else "") if self.description is None else self.description
        return About(name, scale, text)


@dataclass(frozen=True)
class Surveyed:
    """What is at a path, or why it cannot be applied, and what its files were just before."""

    content: AdapterSummary | str
    seen: Fingerprint


class AdapterChecks(Protocol):
    """Whether what is at a path can be used."""

    @property
    def base_names(self) -> frozenset[str]:
        """What the base model is called; no adapter may be."""
        ...

    def name(self, name: str) -> str:
        """``name`` if an adapter may bear it. Raises InvalidRequest."""
        ...

    def survey_or_reason(self, name: str, path: Path) -> Surveyed:
        """What is at ``path``, without its weights. Raises InvalidRequest for the name."""
        ...

    def check_upload(self, name: str) -> None:
        """Raises InvalidAdapterFile where no file can be taken, whatever is in it."""
        ...

    def read(self, name: str, path: Path) -> AdapterSummary:
        """What is at ``path``, every weight checked. Raises InvalidAdapterFile."""
        ...


@dataclass(frozen=True)
class Checks:
    """What an adapter's files are checked against: the base model."""

    base: BaseModel
    base_names: frozenset[str]
    """No adapter may bear one of these."""
    unsupported: Unsupported = Unsupported.REFUSE
    experts: bool = True
    """Adapters of experts can be run."""

    def name(self, name: str) -> str:
        """``name`` if an adapter may bear it. Raises InvalidRequest."""
        check_name(name)
        if name in self.base_names:
            raise InvalidRequest(f"{name!r} names the base model, too; give the adapter another name")
        return name

    def survey_or_reason(self, name: str, path: Path) -> Surveyed:
        """What is at ``path``, without its weights. Raises InvalidRequest for the name."""
        self.name(name)
        seen = fingerprint(path)
        try:
            return Surveyed(self._run(survey_adapter(name, path, self.base, unsupported=self.unsupported)), seen)
        except InvalidAdapterFile as error:
            return Surveyed(error.message, seen)

    def check_upload(self, name: str) -> None:
        """Any file is looked at."""

    def read(self, name: str, path: Path) -> AdapterSummary:
        """What is at ``path``, every weight checked. Raises InvalidAdapterFile."""
        return self._run(read_adapter(name, path, self.base, unsupported=self.unsupported).summary)

    def _run(self, summary: AdapterSummary) -> AdapterSummary:
        if summary.needs_graph and not self.experts:
            raise InvalidAdapterFile(
                f"adapter {summary.name!r} ({summary.path}) targets the weights of experts, which only llama.cpp's own"
                " LoRA graph can adapt: serve it with --lora-mode graph"
            )
        return summary


@dataclass(eq=False)
class Catalog:
    """Changes the registry, and sees to what becomes of versions that were replaced or removed.

    Changes of one name happen one after the other. Files are read in one background thread.
    """

    registry: AdapterRegistry
    pool: Pool
    checks: AdapterChecks
    uploads: UploadFolder
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._threads = background_threads(1)

    async def register(self, name: str, path: Path, source: Source, wish: Wish | None = None) -> RegisteredAdapter:
        """Register what is at ``path``, or replace what ``name`` means for requests from now on.

        Raises InvalidAdapterFile and InvalidRequest, and changes nothing then.
        """
        async with self._lock(name):
            found = await self._survey(name, path)
            if isinstance(found.content, str):
                raise InvalidAdapterFile(found.content)
            return self._put(name, path, found, source, wish or Wish())

    async def register_or_fail(self, name: str, path: Path, source: Source) -> RegisteredAdapter:
        """As :meth:`register`; what cannot be applied is registered as failed. Raises InvalidRequest for the name."""
        self.checks.name(name)
        async with self._lock(name):
            return self._put(name, path, await self._survey(name, path), source, Wish())

    async def refresh(self, version: Version) -> None:
        """The file of ``version`` is not what it was: survey it again, unless the name means something else by now.

        Raises Unavailable where it is being written: the watched folder takes it up when it is complete.
        """
        async with self._lock(version.name):
            adapter = self.present(version.name)
            if adapter is None or adapter.version is None or adapter.version.wire_id != version.wire_id:
                return
            found = await self._survey(adapter.name, adapter.path)
            if isinstance(found.content, str) and adapter.source is Source.FOLDER:
                raise Unavailable(f"the file of adapter {adapter.name!r} is changing; try again", retry_after=2)
            self._put(adapter.name, adapter.path, found, adapter.source, Wish())

    async def take_up(self, name: str) -> str:
        """The file of ``name`` was written anew: requests from now on run under what is there.

        Returns why not, where it cannot be applied: then, as where a file is gone, what was registered stays.
        """
        async with self._lock(name):
            adapter = self.present(name)
            if adapter is None or adapter.version is None:
                return ""
            found = await self._survey(name, adapter.path)
            if isinstance(found.content, str):
                return found.content
            self._put(name, adapter.path, found, adapter.source, Wish())
            return ""

    async def read_pending(self) -> None:
        """Survey what was registered unread, one after the other; a request for one of them does not wait for it."""
        pending = [adapter for adapter in self.registry if adapter.is_pending]
        last = time.monotonic()
        for done, adapter in enumerate(pending):
            if time.monotonic() - last > _PROGRESS_SECONDS:
                last = time.monotonic()
                log.info("%d of %d adapters are read", done, len(pending))
            began = time.monotonic()
            try:
                await self.retry(adapter)
            except Exception:
                log.exception("adapter %s could not be read", adapter.name)
            if self.pool.in_flight:  # reading takes the processors from the engine
                await asyncio.sleep(_REST * (time.monotonic() - began))
        if pending:
            now = [self.present(adapter.name) for adapter in pending]
            failed = sum(1 for adapter in now if adapter is not None and adapter.error)
            log.info("%d adapters are read; %d of them cannot be used", len(pending), failed)

    async def retry(self, adapter: RegisteredAdapter) -> None:
        """Survey an adapter that was not read yet, or one that failed if its file is not the one that failed."""
        if adapter.version is None and fingerprint(adapter.path) != adapter.seen:
            async with self._lock(adapter.name):
                if self.present(adapter.name) == adapter:
                    found = await self._survey(adapter.name, adapter.path)
                    self._put(adapter.name, adapter.path, found, adapter.source, Wish())

    async def keep_upload(self, name: str, incoming: Path, file: Path, wish: Wish) -> RegisteredAdapter:
        """Check what was uploaded to ``file`` (or a PEFT folder) in ``incoming``, keep and register it.

        Raises InvalidAdapterFile, and InvalidRequest for a bad name or scale; nothing has changed then.
        """
        async with self._lock(name):
            self.registry.check(name, wish.scale)
            try:
                summary: AdapterSummary = await self.in_background(lambda: self.checks.read(name, file))
            except InvalidAdapterFile as error:
                raise InvalidAdapterFile(error.message.replace(str(file), "the uploaded file")) from None
            try:
                path = self.uploads.keep(incoming, wish.about(name, self.present(name)), summary.digest)
            except OSError as error:
                raise ServerError(f"the upload cannot be kept: {error.strerror or error}") from error
            return self._put(name, path, Surveyed(summary, fingerprint(path)), Source.UPLOAD, wish)

    async def remove(self, name: str) -> RegisteredAdapter:
        """Forget an adapter; requests in flight finish. Raises UnknownAdapter, and Conflict for one of the watched
        folder, whose file would bring it back.
        """
        async with self._lock(name):
            adapter = self.registry.by_name(name)
            if adapter.source is Source.FOLDER:
                raise Conflict(f"adapter {name!r} is in the watched folder; remove {adapter.path} there instead")
            return self._remove(adapter)

    async def remove_from_folder(self, name: str) -> None:
        """The watched folder no longer has it."""
        async with self._lock(name):
            adapter = self.present(name)
            if adapter is not None and adapter.source is Source.FOLDER:
                self._remove(adapter)

    async def in_background(self, work: Callable[[], Any]) -> Any:
        """The result of ``work`` in the background thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def close(self) -> None:
        """Stop what still waits for versions to come out of use."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- the same without locks ----------------------------------------------------------------------------

    async def _survey(self, name: str, path: Path) -> Surveyed:
        surveyed: Surveyed = await self.in_background(lambda: self.checks.survey_or_reason(name, path))
        return surveyed

    def _put(self, name: str, path: Path, found: Surveyed, source: Source, wish: Wish) -> RegisteredAdapter:
        before = self.present(name)
        adapter = self.registry.put(
            name,
            path,
            found.content,
            source=source,
            default_scale=wish.scale,
            description=wish.description,
            seen=found.seen,
        )
        if before is None or (adapter.version, adapter.error) != (before.version, before.error):
            log_registration(adapter, logging.DEBUG if before and before.is_pending else logging.INFO)
        if before is not None:
            self._retire(before, adapter)
        return adapter

    def _remove(self, adapter: RegisteredAdapter) -> RegisteredAdapter:
        self.registry.remove(adapter.name)
        log.info("adapter %s: removed", adapter.name)
        self._retire(adapter, None)
        return adapter

    def present(self, name: str) -> RegisteredAdapter | None:
        """The adapter called ``name``, if there is one."""
        return self.registry.by_name(name) if name in self.registry else None

    def _retire(self, before: RegisteredAdapter, after: RegisteredAdapter | None) -> None:
        """Unload what was replaced when its last request ends, and remove its file if it was uploaded."""
        same = after and after.version and before.version and after.version.wire_id == before.version.wire_id
        version = None if same else before.version
        moved = after is None or after.path != before.path
        uploaded = before.path if before.source is Source.UPLOAD and moved else None
        if uploaded is not None:
            self.uploads.forget(uploaded)
        if version is not None or uploaded is not None:
            self._start(self._clear_up(version, uploaded))

    async def _clear_up(self, version: Version | None, uploaded: Path | None) -> None:
        try:
            if version is not None:
                await self.pool.retire(version)
        finally:
            # the same content may have been uploaded again meanwhile
            if uploaded is not None and all(adapter.path != uploaded for adapter in self.registry):
                self.uploads.remove(uploaded)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())


def log_registration(adapter: RegisteredAdapter, level: int = logging.INFO) -> None:
    """One line for the adapter, one for each of what was noticed or left out; or why it failed."""
    if adapter.version is None:
        log.warning("adapter %s cannot be used: %s", adapter.name, adapter.error)
        return
    log.log(level, "adapter %d %s: %s", adapter.id, adapter.name, adapter.path)
    for note in (*adapter.version.summary.notes, *adapter.version.summary.left_out):
        log.log(level, "adapter %s: %s", adapter.name, note)
