"""Adapters through llama.cpp's own LoRA graph: one set at a time, for what the delta path does not reach.

Its graph adds ``scale * B (A x)`` to every product of the context alike, those of experts (MoE) included
(``build_lora_mm`` and ``build_lora_mm_id`` in src/llama-graph.cpp). So all that runs has one adapter set, and the set
changes only while nothing runs.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BufferedWriter
from pathlib import Path
from typing import Any

import llama_cpp

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.checks import MAX_FILE_BYTES, Refused
from loraproxy.adapters.files import opened
from loraproxy.adapters.gguf_write import check_in_llama_cpp, write_gguf_adapter
from loraproxy.adapters.read import Unsupported, read_adapter
from loraproxy.adapters.sets import BASE, AdapterSet
from loraproxy.adapters.tensors import Adapter
from loraproxy.config import WorkerAdapter, WorkerSetMember
from loraproxy.errors import AdapterChanged, Conflict, InvalidAdapterFile, InvalidRequest, ServerError
from loraproxy.worker.delta import DeltaPath
from loraproxy.worker.model import Model


@dataclass(frozen=True)
class StagedAdapter:
    """An adapter that was checked; ``file`` holds what was checked, where nobody else can change it."""

    member: WorkerSetMember
    file: Path | None
    """None: it is loaded already."""

    def discard(self) -> None:
        """Remove the file."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Loaded:
    """A ``llama_adapter_lora`` and about how many bytes it holds."""

    handle: Any
    nbytes: int


class GraphLora:
    """The adapter set of one context. ``stage`` in any thread; the rest in the engine's, while nothing is decoded."""

    def __init__(self, model: Model, context: Any, targets: DeltaPath, folder: Path) -> None:
        """``targets`` has watched the graph; ``folder``, for files while they are loaded, is this process's alone."""
        self._model = model
        self._context = context
        self._targets = targets
        self._folder = folder
        self._loaded: dict[int, _Loaded] = {}
        """By wire id, which stands for one content and no other."""
        self.active: AdapterSet = BASE

    @property
    def nbytes(self) -> int:
        """Bytes that the active set's adapters take."""
        return sum(adapter.nbytes for adapter in self._loaded.values())

    def mismatch(self, wanted: AdapterSet) -> Conflict:
        """Why a generation under ``wanted`` cannot run now."""
        return Conflict(
            f"this worker runs one adapter set at a time, now {_shown(self.active)}, but the request asks for"
            f" {_shown(wanted)}"
        )

    # -- checking ------------------------------------------------------------------------------------------

    def stage(self, members: Sequence[WorkerSetMember]) -> list[StagedAdapter]:
        """Check every member that is not loaded yet, and put what llama.cpp is to load into files of our own.

        Raises InvalidRequest for a set that is none, InvalidAdapterFile, AdapterChanged, and ServerError where the
        files cannot be written.
        """
        set_of(members)
        staged: list[StagedAdapter] = []
        try:
            for member in members:
                file = None if member.id in self._loaded else self._stage_file(member)
                staged.append(StagedAdapter(member, file))
        except BaseException:
            for adapter in staged:
                adapter.discard()
            raise
        return staged

    def _stage_file(self, item: WorkerAdapter) -> Path:
        """A GGUF file is copied as it is, so that llama.cpp's own reading of it holds; all else is written anew."""
        unsupported = Unsupported.LEAVE_OUT if item.ignore_unsupported else Unsupported.REFUSE
        adapter = read_adapter(item.name, item.path, self._base, unsupported=unsupported)
        if item.digest and adapter.digest != item.digest:
            raise AdapterChanged(f"the file of adapter {item.name!r} changed: {item.path}")
        self._check_targets(adapter)
        try:
            descriptor, name = tempfile.mkstemp(".gguf", f"adapter-{item.id}-", self._folder)
            try:
                with open(descriptor, "wb") as file:
                    if adapter.source == "gguf" and not adapter.left_out:
                        _copy(item, file, adapter.digest)
                        return Path(name)
                write_gguf_adapter(adapter, self._base, Path(name), "f32")
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            raise _cannot_write(self._folder, error) from error
        return Path(name)

    def _check_targets(self, adapter: Adapter) -> None:
        """Refuse what llama.cpp would apply to nothing, in silence, or abort on. Raises InvalidAdapterFile."""
        check_in_llama_cpp(adapter, self._base)
        for tensor in adapter.tensors:
            if not (tensor.n_expert or self._targets.computes(tensor)):
                raise InvalidAdapterFile(
                    f"adapter {adapter.name!r}: this model's graph has no {tensor.op.value} with '{tensor.target}', so"
                    " the adapter cannot be applied there"
                )
            if f"{tensor.target.removesuffix('.weight')}.scale" in self._base.tensors:
                raise InvalidAdapterFile(
                    f"adapter {adapter.name!r}: '{tensor.target}' has a scale of its own (NVFP4), which llama.cpp's"
                    " LoRA graph does not support; use a base model of another type"
                )

    @cached_property
    def _base(self) -> BaseModel:
        return BaseModel.from_gguf(self._model.path)

    # -- changing ------------------------------------------------------------------------------------------

    def activate(self, staged: Sequence[StagedAdapter]) -> None:
        """Apply the staged set from the next decode on, and free the adapters that are not in it.

        Nothing may run. Raises InvalidAdapterFile, and changes nothing then.
        """
        entering: dict[int, _Loaded] = {}
        try:
            for adapter in staged:
                if adapter.member.id not in self._loaded:
                    entering[adapter.member.id] = self._load(adapter)
        except BaseException:
            for loaded in entering.values():
                llama_cpp.llama_adapter_lora_free(loaded.handle)
            raise
        self._loaded.update(entering)
        self.active = set_of([adapter.member for adapter in staged])
        self._apply()
        members = {adapter.member.id for adapter in staged}
        for wire_id in self._loaded.keys() - members:  # the context no longer points to them
            llama_cpp.llama_adapter_lora_free(self._loaded.pop(wire_id).handle)

    def _load(self, adapter: StagedAdapter) -> _Loaded:
        member, file = adapter.member, adapter.file
        handle = None if file is None else llama_cpp.llama_adapter_lora_init(self._model.handle, str(file).encode())
        if not handle:
            raise InvalidAdapterFile(
                f"adapter {member.name!r} ({member.path}): llama.cpp cannot load it; the worker's log says why"
            )
        assert file is not None
        return _Loaded(handle, file.stat().st_size)

    def _apply(self) -> None:
        entries = self.active.entries
        handles = (llama_cpp.llama_adapter_lora_p_ctypes * len(entries))(*(self._loaded[i].handle for i, _ in entries))
        scales = (ctypes.c_float * len(entries))(*(scale for _, scale in entries))
        llama_cpp.llama_set_adapters_lora(self._context, handles, len(entries), scales)

    def close(self) -> None:
        """Free the adapters; the context must be gone, the model not."""
        for loaded in self._loaded.values():
            llama_cpp.llama_adapter_lora_free(loaded.handle)
        self._loaded.clear()


def set_of(members: Sequence[WorkerSetMember]) -> AdapterSet:
    """The members by wire id. Raises InvalidRequest for a scale out of range, or a member that is there twice."""
    try:
        return AdapterSet.of([(member.id, member.scale) for member in members])
    except ValueError as error:
        raise InvalidRequest(f"not an adapter set: {error}") from None


def _shown(adapters: AdapterSet) -> str:
    return str(adapters.wire()) if adapters.entries else "the base model"


def _cannot_write(where: object, error: OSError) -> ServerError:
    return ServerError(f"an adapter cannot be copied to where it is loaded from: {where}: {error.strerror or error}")


class _Copy:
    """A hash that writes down what it is given."""

    def __init__(self, file: BufferedWriter) -> None:
        self._file = file
        self._digest = hashlib.sha256()

    def update(self, data: bytes | memoryview, /) -> None:
        self._digest.update(data)
        try:
            self._file.write(data)
        except OSError as error:  # whoever reads takes it for an error of reading
            raise _cannot_write(self._file.name, error) from error

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _copy(item: WorkerAdapter, file: BufferedWriter, digest: str) -> None:
    """Copy what was checked, and nothing else, to ``file``. Raises AdapterChanged."""
    copy = _Copy(file)
    changed = AdapterChanged(f"the file of adapter {item.name!r} changed while it was read: {item.path}")
    try:
        with opened(item.path, MAX_FILE_BYTES) as source:
            source.skim(copy)
    except Refused as refusal:
        raise changed from refusal
    if copy.hexdigest() != digest:
        raise changed
