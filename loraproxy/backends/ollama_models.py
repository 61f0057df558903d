"""Derived models: an Ollama model for each adapter set that is asked for, made on first use.

Ollama runs a model with at most one adapter and without a scale, so a set is composed into one GGUF LoRA
(:mod:`loraproxy.adapters.compose`), uploaded, and made a model with the base. Its name comes from the contents and
scales of the set and from the base model's manifest: the same set is the same model after a restart, and a replaced
adapter or base is another one. Its license text says what it was made of (assumption 5 of
:mod:`loraproxy.backends.ollama_api`), which is how it is found again when one of its adapters is removed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.compose import compose, set_digest
from loraproxy.adapters.gguf_write import AdapterDtype, write_gguf_adapter
from loraproxy.adapters.read import read_adapter
from loraproxy.adapters.sets import f32
from loraproxy.adapters.unsupported import Unsupported
from loraproxy.backends.ollama_api import NO_ADAPTERS, ModelEntry, OllamaClient, full_name
from loraproxy.errors import InvalidAdapterFile, NotFound, NotSupported

log = logging.getLogger(__name__)

PREFIX = "loraproxy-"
_NAME_DIGITS = 40
_NOTE = "loraproxy: "
_FILE = "adapter.gguf"
_READ_CHUNK = 1 << 20
T = TypeVar("T")


@dataclass(frozen=True)
class Member:
    """One adapter of a set: its name and files, the hex digest of its content, and its scale in the set."""

    name: str
    path: Path
    digest: str
    scale: float


class DerivedModels:
    """The derived models of one base model on one Ollama server.

    All methods may be called at the same time from several tasks: a set is made once, and whoever asks for it
    meanwhile waits for that. Cancelling one that waits cancels nothing for the others. Call ``close`` at the end.
    """

    def __init__(
        self,
        client: OllamaClient,
        model: str,
        base: BaseModel,
        *,
        dtype: AdapterDtype = "f16",
        unsupported: Unsupported = Unsupported.REFUSE,
        folder: Path | None = None,
    ) -> None:
        """``model``: the base model's name on the server; ``base``: the same, to read adapters for.

        dtype: how composed weights are stored. unsupported: what becomes of parts of adapters that cannot be applied.
        folder: where the files lie until they are uploaded; the system's folder for temporary files if None.
        """
        self._client = client
        self._model = model
        self._base = base
        self._dtype: AdapterDtype = dtype
        self._unsupported = unsupported
        self._folder = folder
        self._names: dict[str, str] = {}
        """Set digest to the name of a model that is known to be there."""
        self._members: dict[str, frozenset[str]] = {}
        self._making: dict[str, asyncio.Task[str]] = {}
        self.takes_adapters = True
        """False: the server is known to refuse them, so that nothing is composed for it."""
        self._one_at_a_time = asyncio.Lock()
        """A composition holds whole adapters in memory."""

    async def name_for(self, members: Sequence[Member]) -> str:
        """The name of the model that runs this set, made first if it is not there; the base model's for an empty set.

        Raises NotFound if the server has no such base model, InvalidAdapterFile if the set cannot be composed or an
        adapter's content is no longer the one of its digest, NotSupported if the server takes no adapters, and what
        :class:`OllamaClient` raises.
        """
        members = [member for member in members if f32(member.scale) != 0.0]
        if not members:
            return self._model
        key = set_digest((member.digest, member.scale) for member in members)
        if key in self._names:
            return self._names[key]
        task = self._making.get(key)
        if task is None:
            task = asyncio.create_task(self._make(key, members), name=f"derived model {key[:12]}")
            self._making[key] = task
            self._members[key] = frozenset(member.digest for member in members)
            task.add_done_callback(lambda done: self._made(key, done))
        return await asyncio.shield(task)

    def forget(self, name: str) -> None:
        """Look again before ``name`` is used next: the server said that it has no such model."""
        self._names = {key: known for key, known in self._names.items() if known != name}

    async def remove_adapter(self, digest: str) -> list[str]:
        """Remove every derived model, of earlier runs too, that has the adapter with this hex digest; their names.

        A model that is being made with it is finished first. Requests that run under one of them end as Ollama
        lets them end: call this when they are done.
        """
        making = [task for key, task in self._making.items() if digest in self._members[key]]
        if making:
            await asyncio.wait(making)
        removed = []
        for entry in await self._client.tags():
            if entry.name.startswith(PREFIX) and digest in await self._adapters_of(entry):
                try:
                    await self._client.delete(entry.name)
                except NotFound:
                    continue  # someone else removed it meanwhile
                self.forget(entry.name.removesuffix(":latest"))
                removed.append(entry.name)
                log.info("event=derived_model_removed model=%s adapter=%s", entry.name, digest)
        return removed

    async def close(self) -> None:
        """Cancel what is being made; what was uploaded is Ollama's to clean up."""
        tasks = tuple(self._making.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _made(self, key: str, task: asyncio.Task[str]) -> None:
        del self._making[key]
        del self._members[key]
        if not task.cancelled() and task.exception() is None:  # asking for it also marks it as seen
            self._names[key] = task.result()

    async def _make(self, key: str, members: Sequence[Member]) -> str:
        models = {full_name(entry.name): entry for entry in await self._client.tags()}
        base = models.get(full_name(self._model))
        if base is None:
            known = ", ".join(sorted(entry.name for entry in models.values() if not entry.name.startswith(PREFIX)))
            raise NotFound(f"the Ollama server has no model {self._model!r}; it has: {known or 'none'}")
        name = PREFIX + hashlib.sha256(f"{base.digest} {self._dtype} {key}".encode()).hexdigest()[:_NAME_DIGITS]
        if full_name(name) in models:
            log.info("event=derived_model_reused model=%s", name)
            return name
        if not self.takes_adapters:
            raise NotSupported(NO_ADAPTERS)
        async with self._one_at_a_time:
            with tempfile.TemporaryDirectory(prefix="loraproxy-", dir=self._folder) as folder:
                file = Path(folder) / _FILE
                digest = await _in_thread(lambda: self._write(members, file))
                if not await self._client.has_blob(digest):
                    await self._client.push_blob(digest, file)
            note = _NOTE + json.dumps(
                {"base": self._model, "adapters": {member.digest: f32(member.scale) for member in members}}
            )
            await self._client.create(name, self._model, {_FILE: digest}, note=note)
        log.info(
            "event=derived_model_made model=%s adapters=%s", name, ",".join(f"{m.name}={m.scale:.6g}" for m in members)
        )
        return name

    def _write(self, members: Sequence[Member], file: Path) -> str:
        """Compose the set into ``file``; its digest as Ollama writes digests."""
        adapters = []
        for member in members:
            adapter = read_adapter(member.name, member.path, self._base, unsupported=self._unsupported)
            if adapter.digest != member.digest:
                raise InvalidAdapterFile(
                    f"adapter {member.name!r} ({member.path}) has changed since it was registered; register it again"
                )
            adapters.append((adapter, member.scale))
        write_gguf_adapter(compose(adapters, self._base), self._base, file, self._dtype)
        digest = hashlib.sha256()
        with file.open("rb") as content:
            while chunk := content.read(_READ_CHUNK):
                digest.update(chunk)
        return f"sha256:{digest.hexdigest()}"

    async def _adapters_of(self, entry: ModelEntry) -> frozenset[str]:
        """The digests of the adapters that a derived model was made of; empty if it is not one of this kind."""
        try:
            text = str((await self._client.show(entry.name)).get("license", ""))
        except NotFound:
            return frozenset()
        for line in text.splitlines():
            if line.startswith(_NOTE):
                try:
                    return frozenset(json.loads(line.removeprefix(_NOTE))["adapters"])
                except (ValueError, KeyError, TypeError):
                    continue
        return frozenset()


async def _in_thread(function: Callable[[], T]) -> T:
    """``function``'s result from a thread. Cancelled, it waits for the thread first: its files must not be removed
    under it.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        if not work.cancelled():
            work.exception()
        raise
