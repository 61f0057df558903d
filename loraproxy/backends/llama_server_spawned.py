"""llama-servers that are started here, with the model and the adapters there are.

A llama-server cannot load an adapter once it runs. So a new one is started with the new list beside the old one, which
finishes the requests it has and is ended then: they share the base model's pages, where it is mapped.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.gguf_write import write_gguf_adapter
from loraproxy.adapters.read import read_adapter, survey_adapter
from loraproxy.adapters.unsupported import Unsupported
from loraproxy.backends.base import WorkerExit
from loraproxy.backends.embedded import Liveness
from loraproxy.backends.llama_server import LlamaServers, look_at
from loraproxy.backends.llama_server_places import Place, Reach
from loraproxy.backends.llama_server_process import (
    LlamaServerProcess,
    LlamaServerSettings,
    new_api_key,
    understood_options,
)
from loraproxy.config import WorkerAdapter
from loraproxy.errors import AdapterChanged, ApiError, InvalidAdapterFile, StartFailed, Unavailable
from loraproxy.logs import REQUEST_ID

log = logging.getLogger(__name__)

_HEALTH_INTERVAL = 0.1
_OLD_GRACE = 10.0


@dataclass(eq=False)
class _Generation:
    """One process and the adapters that it was started with, by wire id."""

    process: LlamaServerProcess
    place: Place
    bytes_of: dict[int, int]


class SpawnedServers(LlamaServers):
    """One llama-server of ours, and while its list of adapters changes, two."""

    def __init__(
        self,
        settings: LlamaServerSettings,
        wanted: Callable[[], Sequence[WorkerAdapter]],
        liveness: Liveness | None = None,
    ) -> None:
        """``wanted`` gives the adapters to start with, whenever a server is started."""
        super().__init__(new_api_key())
        self._liveness = liveness or Liveness()
        self._watch: asyncio.Task[None] | None = None
        self._settings = settings
        self._wanted = wanted
        self._understood = ""
        self._folder: Path | None = None
        self._base: BaseModel | None = None
        self._current: _Generation | None = None
        self._starting = asyncio.Lock()
        self._changed = asyncio.Event()
        self._processes: list[LlamaServerProcess] = []
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        """The process id of the server that takes new requests."""
        return self._current.process.pid if self._current else None

    async def start(self) -> None:
        """Start the server and return when it is ready. Raises StartFailed with its last words."""
        self._understood = await understood_options(self._settings.binary)
        self._folder = Path(tempfile.mkdtemp(prefix="loraproxy-"))
        try:
            async with self._starting:
                await self._start_generation(self._wanted())
        except ApiError as error:
            raise StartFailed(error.message) from error

    async def wait(self) -> WorkerExit:
        """Return when the server that takes new requests has ended by itself."""
        while True:
            assert self._current is not None
            self._changed.clear()
            ended = asyncio.create_task(self._current.process.wait())
            changed = asyncio.create_task(self._changed.wait())
            try:
                await asyncio.wait({ended, changed}, return_when=asyncio.FIRST_COMPLETED)
                if ended.done() and not changed.done():
                    self._current.place.reach = Reach.DOWN
                    self._current.place.why = "the llama-server ended and is being replaced; try again later"
                    self.places.pump()
                    return ended.result()
            finally:
                ended.cancel()
                changed.cancel()

    async def stop(self, grace: float) -> None:
        """End all processes and remove the converted adapters."""
        self._current = None
        for task in (*self._leaving, *([self._watch] if self._watch else ())):
            task.cancel()
        await asyncio.gather(*(process.stop(grace) for process in self._processes))
        await self._close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def load_adapter(self, item: WorkerAdapter) -> int:
        """Return when a server runs that has it; the bytes of its file. Raises InvalidAdapterFile, AdapterChanged."""
        async with self._starting:
            assert self._current is not None
            if item.id not in self._current.bytes_of:
                wanted = {other.id: other for other in self._wanted()}
                log.info("event=restart adapter=%s: a llama-server that has it is started", item.name)
                try:
                    await self._start_generation(tuple({**wanted, item.id: item}.values()))
                except StartFailed as error:
                    raise InvalidAdapterFile(f"no llama-server starts with adapter {item.name!r}: {error}") from error
            return self._current.bytes_of[item.id]

    async def unload_adapter(self, wire_id: int) -> None:
        """The next server that is started does not have it; this one keeps it."""

    async def _start_generation(self, items: Sequence[WorkerAdapter]) -> None:
        files = {item.id: await asyncio.to_thread(self._file, item) for item in items}
        options = self._settings.options(tuple(files.values()), self._understood)
        process = await LlamaServerProcess.start(self._settings.binary, options, self.api_key)
        self._processes.append(process)
        try:
            place = Place(self._client(process.url))
            await self._until_ready(process, place)
            if len(place.served) != len(files):
                raise StartFailed(f"the llama-server was given {len(files)} adapters and lists {len(place.served)}")
            place.ids = {wire_id: place.served[index].id for index, wire_id in enumerate(files)}
            if place.served:
                # what it runs where a request cannot say: the base model
                await place.client.set_scales({adapter.id: 0.0 for adapter in place.served})
        except BaseException:
            await process.stop(0)
            self._processes.remove(process)
            raise
        place.reach = Reach.UP
        self.places.all.append(place)
        old, self._current = self._current, _Generation(process, place, {i: f.stat().st_size for i, f in files.items()})
        self._changed.set()
        if self._watch is not None:
            self._watch.cancel()
        self._watch = asyncio.create_task(self._kill_when_hung(self._current))
        if old is not None:
            old.place.leaving = True
            task = asyncio.create_task(self._leave(old))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        self.places.pump()

    async def _until_ready(self, process: LlamaServerProcess, place: Place) -> None:
        ended = asyncio.create_task(process.wait())
        try:
            while True:
                try:
                    await look_at(place.client, place)
                except Unavailable:
                    await asyncio.wait({ended}, timeout=_HEALTH_INTERVAL)
                    if ended.done():
                        raise StartFailed(
                            f"the llama-server ended while it was starting: {ended.result().report()}"
                        ) from None
                else:
                    return
        finally:
            ended.cancel()

    async def _kill_when_hung(self, generation: _Generation) -> None:
        """End a server that does not answer, so that ``wait`` returns and it is replaced."""
        REQUEST_ID.set("")  # it outlives the request that the server was started for
        failures = 0
        while failures < self._liveness.failures and generation is self._current:
            await asyncio.sleep(self._liveness.interval)
            try:
                await asyncio.wait_for(generation.place.client.check_health(), self._liveness.timeout)
                failures = 0
            except (ApiError, asyncio.TimeoutError):
                failures += 1
        if generation is not self._current:
            return
        log.error("event=hung pid=%d: %d times in a row it was not healthy; killing it", self.pid, failures)
        generation.process.kill()

    async def _leave(self, old: _Generation) -> None:
        """End ``old`` when its last request has ended."""
        REQUEST_ID.set("")
        await old.place.unused.wait()
        self.places.all.remove(old.place)
        self.places.pump()
        log.info("event=drained pid=%d", old.process.pid)
        await old.process.stop(_OLD_GRACE)
        self._processes.remove(old.process)

    def _file(self, item: WorkerAdapter) -> Path:
        assert self._folder is not None
        if self._base is None:
            self._base = BaseModel.from_gguf(self._settings.model)
        return file_for(item, self._base, self._folder)


def file_for(item: WorkerAdapter, base: BaseModel, folder: Path) -> Path:
    """The adapter as a file that llama-server loads: its own, or what it says as a GGUF file in ``folder``, made once.

    Raises InvalidAdapterFile, and AdapterChanged where it is not the content that was registered.
    """
    if item.path.is_file() and not item.ignore_unsupported:
        _check_digest(item, survey_adapter(item.name, item.path, base).digest)
        return item.path
    file = folder / f"{item.name}-{item.digest[:16] or item.id}.gguf"
    if not file.exists():
        unsupported = Unsupported.LEAVE_OUT if item.ignore_unsupported else Unsupported.REFUSE
        adapter = read_adapter(item.name, item.path, base, unsupported=unsupported)
        _check_digest(item, adapter.digest)
        try:
            write_gguf_adapter(adapter, base, file)
        except InvalidAdapterFile:  # too large for f16
            write_gguf_adapter(adapter, base, file, "f32")
    return file


def _check_digest(item: WorkerAdapter, found: str) -> None:
    if item.digest and found != item.digest:
        raise AdapterChanged(f"adapter {item.name!r} ({item.path}) has changed since it was registered")
