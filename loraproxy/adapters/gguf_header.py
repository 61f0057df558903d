"""The header of a GGUF file, read without trusting it.

The ``gguf`` package's reader allocates and loops over numbers as the file states them, and takes seconds over a
large vocabulary. This one checks every count, length and offset against the file's length before it uses it.
Format: docs/gguf.md of ggml; limits as in ggml/src/gguf.cpp.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any

from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)

from loraproxy.adapters.stored import StoredTensor

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_NAME = 64 * 1024
_MAX_ENTRIES = 1 << 16
_MAX_TENSORS = 1 << 18
_MAX_DIMS = 4
_MAX_DIM = 1 << 40
_KEPT_ARRAY = 16 * 1024
_MIN_KV_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8

_SCALARS = {
    kind: struct.Struct(code)
    for kind, code in {
        GGUFValueType.UINT8: "<B",
        GGUFValueType.INT8: "<b",
        GGUFValueType.UINT16: "<H",
        GGUFValueType.INT16: "<h",
        GGUFValueType.UINT32: "<I",
        GGUFValueType.INT32: "<i",
        GGUFValueType.FLOAT32: "<f",
        GGUFValueType.BOOL: "<?",
        GGUFValueType.UINT64: "<Q",
        GGUFValueType.INT64: "<q",
        GGUFValueType.FLOAT64: "<d",
    }.items()
}
_U32, _U64 = _SCALARS[GGUFValueType.UINT32], _SCALARS[GGUFValueType.UINT64]
# dimensions, type, offset
_INFO = {n: struct.Struct(f"<{n}QIQ") for n in range(1, _MAX_DIMS + 1)}


class GgufError(ValueError):
    """The file is not a whole, valid GGUF file; the message says where it is wrong."""


class HeaderGoesOn(Exception):
    """The header is longer than the part of the file that was given."""


@dataclass(frozen=True)
class GgufArray:
    """An array among the metadata. ``values`` is empty for strings and for very long arrays."""

    type: GGUFValueType
    count: int
    values: tuple[int | float | bool, ...] = ()


GgufValue = str | int | float | bool | GgufArray
GgufTensor = StoredTensor


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensors of one file; every tensor lies within it."""

    metadata: Mapping[str, GgufValue]
    types: Mapping[str, GGUFValueType]
    tensors: Mapping[str, GgufTensor]
    entries: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Where each metadata entry lies, from its key to the end of its value: start and end in bytes, in file order."""

    def text(self, key: str) -> str:
        """The string under ``key``, or "". Raises GgufError if it is not a string."""
        value = self.metadata.get(key, "")
        if not isinstance(value, str):
            raise GgufError(f"{key} must be a string")
        return value

    def count(self, key: str) -> int:
        """The non-negative integer under ``key``, or 0. Raises GgufError if it is anything else."""
        value = self.metadata.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise GgufError(f"{key} must be a whole number")
        return value


def read_gguf_header(data: bytes | mmap, size: int | None = None) -> GgufHeader:
    """Read the header of a GGUF file of ``size`` bytes, of which ``data`` is all (the default) or the beginning.

    Raises GgufError, and HeaderGoesOn if the header ends beyond ``data``.
    """
    cursor = _Cursor(data, len(data) if size is None else size)
    n_tensors, n_kv = _preamble(cursor)
    metadata: dict[str, GgufValue] = {}
    types: dict[str, GGUFValueType] = {}
    entries: dict[str, tuple[int, int]] = {}
    for _ in range(n_kv):
        begin = cursor.at
        key = cursor.string("a metadata key", _MAX_NAME)
        if key in metadata:
            raise GgufError(f"the metadata key {key[:80]!r} appears twice")
        types[key], metadata[key] = _value(cursor, key)
        entries[key] = (begin, cursor.at)
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise GgufError("general.alignment is not a power of two")
    infos = [_tensor_info(cursor) for _ in range(n_tensors)]
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise GgufError(f"the tensor {name[:80]!r} appears twice")
        tensors[name] = _placed(name, shape, kind, start + offset, cursor.size)
    _check_apart(tensors)
    return GgufHeader(metadata, types, tensors, entries)


class _Cursor:
    """A position in the file; every read is checked against the file's end first."""

    def __init__(self, data: bytes | mmap, size: int) -> None:
        self.data = data
        self.size = size
        self.known = len(data)
        self.at = 0

    def need(self, n_bytes: int, what: str) -> None:
        if n_bytes > self.known - self.at:
            if n_bytes > self.size - self.at:
                raise GgufError(f"the file ends within {what}: it is truncated or damaged")
            raise HeaderGoesOn

    def unpack(self, layout: struct.Struct, what: str) -> tuple[Any, ...]:
        self.need(layout.size, what)
        values = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return values

    def scalar(self, layout: struct.Struct, what: str) -> Any:
        return self.unpack(layout, what)[0]

    def string(self, what: str, limit: int | None = None) -> str:
        length: int = self.scalar(_U64, what)
        if limit is not None and length > limit:
            raise GgufError(f"{what} is {length} bytes long; at most {limit} are allowed: the file is damaged")
        self.need(length, what)
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise GgufError(f"{what} is not valid UTF-8") from None

    def skip_strings(self, count: int, what: str) -> None:
        unpack, end, at = _U64.unpack_from, self.known - 8, self.at
        for _ in range(count):
            if at > end:
                self.at = at
                self.need(8, what)
            at += 8 + unpack(self.data, at)[0]
        self.at = at
        self.need(0, what)


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; return the numbers of tensors and of metadata entries."""
    if cursor.known < len(_MAGIC) or cursor.data[: len(_MAGIC)] != _MAGIC:
        raise GgufError("not a GGUF file (it does not begin with 'GGUF')")
    cursor.at = len(_MAGIC)
    version = cursor.scalar(_U32, "the header")
    if version not in _VERSIONS:
        endian = " (a big-endian file?)" if version & 0xFFFF == 0 and version else ""
        raise GgufError(f"GGUF version {version}{endian} is not supported; versions 2 and 3, little-endian, are")
    n_tensors, n_kv = cursor.scalar(_U64, "the header"), cursor.scalar(_U64, "the header")
    left = cursor.size - cursor.at
    if n_kv * _MIN_KV_BYTES + n_tensors * _MIN_TENSOR_BYTES > left:
        raise GgufError(
            f"the header announces {n_kv} metadata entries and {n_tensors} tensors, more than {left} bytes can hold: "
            "the file is truncated or damaged"
        )
    if n_kv > _MAX_ENTRIES or n_tensors > _MAX_TENSORS:
        raise GgufError(
            f"the header announces {n_kv} metadata entries and {n_tensors} tensors; at most {_MAX_ENTRIES} and "
            f"{_MAX_TENSORS} are supported"
        )
    return n_tensors, n_kv


def _value_type(raw: int, key: str) -> GGUFValueType:
    try:
        return GGUFValueType(raw)
    except ValueError:
        raise GgufError(f"{key[:80]} has the unknown value type {raw}") from None


def _value(cursor: _Cursor, key: str) -> tuple[GGUFValueType, GgufValue]:
    kind = _value_type(cursor.scalar(_U32, key[:80]), key)
    if kind is GGUFValueType.STRING:
        return kind, cursor.string(key[:80])
    if kind is not GGUFValueType.ARRAY:
        return kind, cursor.scalar(_SCALARS[kind], key[:80])
    item = _value_type(cursor.scalar(_U32, key[:80]), key)
    count: int = cursor.scalar(_U64, key[:80])
    if item is GGUFValueType.ARRAY:
        raise GgufError(f"{key[:80]} is an array of arrays")
    if item is GGUFValueType.STRING:
        cursor.need(count * 8, key[:80])
        cursor.skip_strings(count, key[:80])
        return kind, GgufArray(item, count)
    layout = _SCALARS[item]
    size = count * layout.size
    cursor.need(size, key[:80])
    values: tuple[Any, ...] = ()
    if count <= _KEPT_ARRAY:
        values = struct.unpack_from(f"<{count}{layout.format[1]}", cursor.data, cursor.at)
    cursor.at += size
    return kind, GgufArray(item, count, values)


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape in numpy order, raw type, offset within the data) as the file states them."""
    name = cursor.string("a tensor's name", _MAX_NAME)
    n_dims = cursor.scalar(_U32, "a tensor's entry")
    if not 1 <= n_dims <= _MAX_DIMS:
        raise GgufError(f"tensor {name[:80]!r} has {n_dims} dimensions; 1 to {_MAX_DIMS} are allowed")
    *dims, kind, offset = cursor.unpack(_INFO[n_dims], "a tensor's entry")
    shape = tuple(reversed(dims))
    if min(shape) < 1 or max(shape) > _MAX_DIM:
        raise GgufError(f"tensor {name[:80]!r} has the impossible shape {shape}")
    return name, shape, kind, offset


def _placed(name: str, shape: tuple[int, ...], kind: int, offset: int, file_size: int) -> GgufTensor:
    try:
        quant = GGMLQuantizationType(kind)
    except ValueError:
        raise GgufError(f"tensor {name[:80]!r} has the unknown type {kind}") from None
    block, block_bytes = GGML_QUANT_SIZES[quant]
    if shape[-1] % block:
        raise GgufError(f"tensor {name[:80]!r}: rows of {shape[-1]} values do not divide into {quant.name} blocks")
    n_bytes = shape[-1] // block * block_bytes
    for dim in shape[:-1]:
        n_bytes *= dim
    if offset + n_bytes > file_size:
        raise GgufError(
            f"tensor {name[:80]!r} ends at byte {offset + n_bytes}, but the file has {file_size}: "
            "it is truncated or damaged"
        )
    return GgufTensor(name, shape, quant, offset, n_bytes)


def _check_apart(tensors: Mapping[str, GgufTensor]) -> None:
    """No two tensors share bytes: so many tensors in few bytes cannot claim more memory than the file has."""
    end = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise GgufError(f"the tensor {tensor.name[:80]!r} begins before the one before it ends")
        end = tensor.offset + tensor.n_bytes
