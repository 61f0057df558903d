"""The header of a safetensors file, read without trusting it and without its data.

The ``safetensors`` package wants the whole content, or maps a file that somebody may truncate meanwhile; this reads
the same format (https://huggingface.co/docs/safetensors#format) from the first bytes alone. Rules as in the package:
offsets leave no holes and cover the file to its end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from gguf.constants import GGMLQuantizationType

from loraproxy.adapters.checks import MAX_NAME, Refused, listed
from loraproxy.adapters.files import CheckedFile
from loraproxy.adapters.names import shorten
from loraproxy.adapters.stored import StoredTensor

_MAX_HEADER = 8 << 20
_MAX_DIM = 1 << 40
_MAX_DIMS = 8
_TYPES = {
    "F32": (GGMLQuantizationType.F32, 4),
    "F16": (GGMLQuantizationType.F16, 2),
    "BF16": (GGMLQuantizationType.BF16, 2),
}


def read_safetensors_header(file: CheckedFile) -> dict[str, StoredTensor]:
    """The tensors of ``file``, sorted by name. Raises Refused with the reason."""
    start = _header_end(file)
    header = _parse(file.name, file.head(start)[8:start])
    header.pop("__metadata__", None)
    strange = [f"{name} ({shorten(kind, 20)})" for name, kind in _types(file.name, header) if kind not in _TYPES]
    if strange:
        raise Refused(f"tensors of a type that cannot be read: {listed(strange)}; save them as F32, F16 or BF16")
    tensors = [_tensor(file.name, name, entry, start) for name, entry in header.items()]
    _check_places(file, tensors, start)
    return {tensor.name: tensor for tensor in sorted(tensors, key=lambda tensor: tensor.name)}


def _header_end(file: CheckedFile) -> int:
    """Where the data begins."""
    if file.size < 8:
        raise Refused(f"{file.name} is truncated or damaged: it has only {file.size} bytes")
    length = int.from_bytes(file.head(8)[:8], "little")
    if length > file.size - 8:
        raise Refused(
            f"{file.name} announces a header of {length} bytes but has only {file.size}: it is truncated or damaged"
        )
    if length > _MAX_HEADER:
        raise Refused(f"{file.name} has a header of {length} bytes; at most {_MAX_HEADER} are supported")
    return 8 + length


def _parse(where: str, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{where} is damaged: its header is not JSON ({shorten(str(error))})") from None
    if not isinstance(header, dict):
        raise Refused(f"{where} is damaged: its header is not a JSON object")
    return header


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name appears twice")
    return made


def _types(where: str, header: Mapping[str, Any]) -> list[tuple[str, Any]]:
    for name, entry in header.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
            raise Refused(f"{where} is damaged: the entry of {shorten(name)} is no tensor")
        if len(name) > MAX_NAME:
            raise Refused(f"the name {shorten(name)} is longer than {MAX_NAME}")
    return [(name, entry["dtype"]) for name, entry in header.items()]


def _tensor(where: str, name: str, entry: Mapping[str, Any], start: int) -> StoredTensor:
    shape, offsets = _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2 or len(shape) > _MAX_DIMS:
        raise Refused(f"{where} is damaged: the entry of {shorten(name)} has no valid shape or place")
    kind, size = _TYPES[entry["dtype"]]
    begin, end = offsets
    n_bytes = math.prod(shape) * size
    if end - begin != n_bytes:
        raise Refused(f"{where} is damaged: {shorten(name)} has {end - begin} bytes where its shape needs {n_bytes}")
    return StoredTensor(name, shape, kind, start + begin, n_bytes)


def _sizes(values: Any) -> tuple[int, ...] | None:
    """``values`` as a tuple, if they are a list of numbers that a size or a place may have."""
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value <= _MAX_DIM for value in values):
        return None
    return tuple(values)


def _check_places(file: CheckedFile, tensors: list[StoredTensor], start: int) -> None:
    at = start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.n_bytes)):
        if tensor.offset != at:
            raise Refused(f"{file.name} is damaged: {shorten(tensor.name)} does not begin where the one before it ends")
        at += tensor.n_bytes
    if at != file.size:
        raise Refused(f"{file.name} has {file.size} bytes where its header needs {at}: it is truncated or damaged")
