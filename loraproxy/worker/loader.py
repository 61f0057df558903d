"""Loading adapters beside the engine: a file's bytes become weights in threads that yield to the engine's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from loraproxy.adapters.background import background_threads
from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.read import Unsupported, read_in_turn
from loraproxy.config import WorkerAdapter
from loraproxy.errors import AdapterChanged
from loraproxy.worker.delta import DeltaPath, Preparation
from loraproxy.worker.heap import give_back_free_memory

if TYPE_CHECKING:  # at run time llama_cpp must come first: delta.py sees to it
    from loraproxy import _native

T = TypeVar("T")

CONCURRENT_LOADS = 2
"""More than one, so that a small adapter does not wait for a large one."""


class AdapterLoader:
    """Reads adapters for one model and its delta path."""

    def __init__(self, model: Path, delta: DeltaPath) -> None:
        self._model = model
        self._delta = delta
        self._threads = background_threads(CONCURRENT_LOADS)
        self._lock = threading.Lock()
        self._loading = 0
        self._idle = threading.Event()
        self._idle.set()

    def read(self, item: WorkerAdapter) -> _native.AdapterWeights:
        """Read, check and convert the adapter, in this thread.

        Raises InvalidAdapterFile, and AdapterChanged where the content is not the one that ``item`` speaks of.
        """
        with self._lock:
            base = self._base
        unsupported = Unsupported.LEAVE_OUT if item.ignore_unsupported else Unsupported.REFUSE
        preparation = Preparation(self._delta, item.name)
        digest = read_in_turn(item.name, item.path, base, preparation.add, unsupported=unsupported)
        if item.digest and digest != item.digest:
            raise AdapterChanged(f"the file of adapter {item.name!r} changed: {item.path}")
        return preparation.finish()

    async def load(self, item: WorkerAdapter) -> _native.AdapterWeights:
        """As :meth:`read`, in a background thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._read_counted, item)

    async def in_background(self, work: Callable[[], T]) -> T:
        """The result of ``work`` from a background thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def give_way(self, seconds: float) -> None:
        """For the engine's thread, between two steps: let loads have the processors, ``seconds`` at most.

        Where every processor has an engine's thread, a load gets nothing done in a step, or if it did, would hold up
        all of them at their next barrier. So it has its time between steps, where it is known how long that is.
        """
        self._idle.wait(seconds)

    def _read_counted(self, item: WorkerAdapter) -> _native.AdapterWeights:
        self._count(1)
        try:
            return self.read(item)
        finally:
            self._count(-1)
            give_back_free_memory()  # what it took beside the weights

    def _count(self, change: int) -> None:
        with self._lock:
            self._loading += change
            if self._loading:
                self._idle.clear()
            else:
                self._idle.set()

    def close(self) -> None:
        """Begin no further load."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def _base(self) -> BaseModel:
        return BaseModel.from_gguf(self._model)
