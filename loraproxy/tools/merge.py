"""``loraproxy merge``: a base model with adapters added to its weights, as a GGUF model of its own."""

from __future__ import annotations

import argparse
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import MODEL_ARCH_NAMES, MODEL_TENSOR, MODEL_TENSORS, GGMLQuantizationType, LlamaFileType

from loraproxy.adapters.base_model import OUTPUT, TOKEN_EMBD, BaseModel
from loraproxy.adapters.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from loraproxy.adapters.read import Unsupported, read_adapter
from loraproxy.endings import ends_tidily
from loraproxy.errors import CommandFailed
from loraproxy.tools import files, gguf_copy
from loraproxy.tools.deltas import Delta, Rounding, deltas_of, look_up, merged
from loraproxy.tools.files import ScaledAdapter
from loraproxy.tools.ggml import NEEDS_IMATRIX, WRITABLE
from loraproxy.tools.gguf_copy import NewTensor
from loraproxy.tools.progress import Progress
from loraproxy.tools.quantise import FILE_TYPES, bits_per_weight, quantise

DESCRIPTION = "Add adapters to a base model's weights and write the result as a GGUF model of its own."
_WELL_KEPT = 0.85


@dataclass(frozen=True)
class Merged:
    """What was written: tensors changed and in all, bytes, what rounding left of the adapters; and what was not."""

    n_changed: int
    n_tensors: int
    n_bytes: int
    rounding: Rounding
    left_out: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``loraproxy merge``."""
    parser.add_argument("--model", "-m", type=Path, required=True, metavar="FILE", help="the base model (GGUF)")
    parser.add_argument(
        "--adapter",
        "-a",
        action="append",
        required=True,
        type=ScaledAdapter.parse,
        metavar="PATH[:SCALE]",
        help="a GGUF adapter or a PEFT folder, and its scale (1); repeatable",
    )
    parser.add_argument("--output", "-o", type=Path, required=True, metavar="OUT.gguf", help="the file to write")
    parser.add_argument(
        "--type",
        type=str.upper,
        choices=FILE_TYPES,
        metavar="TYPE",
        help=f"one of {', '.join(FILE_TYPES)}; without it every tensor keeps the base's type, and tensors that no"
        " adapter touches are copied byte for byte",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT.gguf if it exists")
    parser.add_argument("--ignore-unsupported", action="store_true", help="merge the rest of what is not supported")


def run(options: argparse.Namespace) -> int:
    """Merge, and say what was written. Raises CommandFailed, and ApiError from reading base and adapters."""
    files.existing(options.model)
    for adapter in options.adapter:
        files.existing(adapter.path)
    inputs = (options.model, *(adapter.path for adapter in options.adapter))
    files.check_output(options.output, force=options.force, inputs=inputs)
    kind = FILE_TYPES.get(options.type)
    unsupported = Unsupported.LEAVE_OUT if options.ignore_unsupported else Unsupported.REFUSE
    with ends_tidily():
        result = merge(options.model, options.adapter, options.output, kind, unsupported)
    for note in result.left_out:
        print(files.printable(f"note: {note}"))
    how = f"type {options.type}" if kind is not None else "every tensor in the type it has in the base model"
    changed = f"{result.n_changed} of {result.n_tensors} tensors merged"
    print(files.printable(f"wrote {options.output}: {files.megabytes(result.n_bytes)}, {changed}, {how}"))
    if result.rounding.kept < _WELL_KEPT:
        types = options.type or "the types of the base model"
        print(
            f"note: rounding to {types} leaves {result.rounding.kept:.0%} of what the adapters add; "
            "--type Q8_0 or F16 keeps all of it"
        )
    return 0


def merge(
    model: Path,
    adapters: Iterable[ScaledAdapter],
    output: Path,
    kind: LlamaFileType | None = None,
    unsupported: Unsupported = Unsupported.REFUSE,
) -> Merged:
    """Write ``model`` with ``adapters`` added to ``output``, whole or not at all.

    ``kind`` None, or that of the base: every tensor keeps its ggml type, and what no adapter touches its bytes.
    Otherwise the merged tensors go as float32 into a temporary file beside the output, which llama.cpp quantises.

    Memory: the adapters as float32 and a few MB. Raises CommandFailed, InvalidRequest for the base model and
    InvalidAdapterFile for an adapter.
    """
    with _opened(model) as (source, header):
        if header.count("split.count") > 1:
            raise CommandFailed(f"{model} is one part of a split model; join it first: llama-gguf-split --merge")
        base = BaseModel.from_gguf(model)
        given = list(adapters)
        read = [
            (item.scale, read_adapter(files.adapter_name(item.path), item.path, base, unsupported=unsupported))
            for item in given
        ]
        if header.metadata.get("general.file_type") == kind:
            kind = None
        rounding = Rounding()
        plan = _Plan(source, header, base, deltas_of(read), None if kind is None else GGMLQuantizationType.F32)
        tensors = plan.tensors(rounding)
        title = " + ".join([base.name or model.stem, *(item.label() for item in given)])
        entries = gguf_copy.metadata_entries(source, header, {"general.name": title})
        with files.new_file(output) as unfinished:
            if kind is None:
                _write(unfinished, output, header, entries, tensors, 0)
            else:
                values = sum(_n_values(tensor) for tensor in tensors)
                with files.temporary(output, "f32") as exact:
                    _write(exact, output, header, entries, tensors, int(values * bits_per_weight(kind) / 8))
                    quantise(exact, unfinished, kind)
                rounding = plan.look_up(unfinished)
            size = unfinished.stat().st_size
        left_out = tuple(sentence for _, adapter in read for sentence in adapter.left_out)
        return Merged(len(plan.deltas), len(tensors), size, rounding, left_out)


def _write(
    path: Path, output: Path, header: GgufHeader, entries: list[bytes], tensors: list[NewTensor], more: int
) -> None:
    alignment = gguf_copy.alignment_of(header)
    size = gguf_copy.file_size(entries, tensors, alignment)
    files.check_room(output, size + more)
    with path.open("xb") as file, Progress("merging", size) as progress:
        gguf_copy.write_gguf(file, entries, tensors, alignment, progress.advance)
        file.flush()
        os.fsync(file.fileno())


def _n_values(tensor: NewTensor) -> int:
    n = 1
    for dim in tensor.shape:
        n *= dim
    return n


@contextmanager
def _opened(model: Path) -> Iterator[tuple[mmap.mmap, GgufHeader]]:
    """The base model's file, mapped, and its header, once BaseModel has found it to be a model."""
    BaseModel.from_gguf(model)
    with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as source:
        yield source, read_gguf_header(source)


@dataclass(frozen=True)
class _Plan:
    """Which tensor of the output comes from which of the base, and what is added to it.

    exact: the type of merged tensors; None: that of the base's tensor.
    """

    source: mmap.mmap
    header: GgufHeader
    base: BaseModel
    deltas: dict[str, Delta]
    exact: GGMLQuantizationType | None

    def tensors(self, rounding: Rounding) -> list[NewTensor]:
        """The output's tensors in the base's order. Raises CommandFailed for what cannot be merged."""
        self._check()
        found = [self._one(tensor, tensor.name, rounding) for tensor in self.header.tensors.values()]
        if self._unties():
            embedding = self.header.tensors[TOKEN_EMBD]
            place = 1 + [tensor.name for tensor in found].index(TOKEN_EMBD)
            found.insert(place, self._one(embedding, OUTPUT, rounding))
        return found

    def _one(self, tensor: GgufTensor, name: str, rounding: Rounding) -> NewTensor:
        delta = self.deltas.get(name)
        if delta is None:
            return gguf_copy.copied(self.source, tensor, name)
        return merged(self.source, tensor, delta, tensor.type if self.exact is None else self.exact, rounding, name)

    def look_up(self, output: Path) -> Rounding:
        """What is left of the adapters in a file that was quantised afterwards."""
        total = Rounding()
        with output.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as other:
            written = read_gguf_header(other).tensors
            for name, delta in self.deltas.items():
                tensor = self._origin(name)
                found = look_up(self.source, tensor, delta, other, written[name])
                total.moved += found.moved
                total.delta += found.delta
        return total

    def _origin(self, name: str) -> GgufTensor:
        """The base's tensor that the output's tensor ``name`` comes from."""
        return self.header.tensors.get(name) or self.header.tensors[TOKEN_EMBD]

    def _unties(self) -> bool:
        """True where embedding and head, one tensor in the base, come out different."""
        return self.base.tied_output and bool({TOKEN_EMBD, OUTPUT} & self.deltas.keys())

    def _check(self) -> None:
        if self._unties() and not _may_have_output(self.base.architecture):
            raise CommandFailed(
                f"{self.base.describe()}: its embedding is also its output head, and llama.cpp knows no model of this "
                "architecture with a head of its own, so adapters of one of the two cannot be merged; serve the "
                "adapter instead"
            )
        for target in self.deltas:
            self._check_type(self._origin(target))
            own_scale = f"{target.removesuffix('.weight')}.scale"
            if own_scale in self.header.tensors:
                raise CommandFailed(
                    f"tensor {target} has a scale of its own ({own_scale}), which merging cannot take into account; "
                    "merge into a base model of another type"
                )

    def _check_type(self, tensor: GgufTensor) -> None:
        readable = tensor.type in WRITABLE or tensor.type in NEEDS_IMATRIX
        if not readable:
            raise CommandFailed(f"tensor {tensor.name} has the type {tensor.type.name}, which cannot be merged into")
        if self.exact is None and tensor.type in NEEDS_IMATRIX:
            raise CommandFailed(
                f"tensor {tensor.name} has the type {tensor.type.name}, which can only be written with an importance "
                "matrix; give another --type, e.g. --type Q4_K_M"
            )


def _may_have_output(architecture: str) -> bool:
    """True if llama.cpp loads an ``output.weight`` where a model of this architecture has one."""
    known = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
    return architecture in known and MODEL_TENSOR.OUTPUT in MODEL_TENSORS[known[architecture]]
