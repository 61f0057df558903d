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

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_NAME = 64 * 1024
_MAX_DIMS = 4
_MAX_DIM = 1 << 40
_KEPT_ARRAY = 16 * 1024
_MIN_KV_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8

_SCALARS = {
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
}


class GgufError(ValueError):
    """The file is not a whole, valid GGUF file; the message says where it is wrong."""


@dataclass(frozen=True)
class GgufArray:
    """An array among the metadata. ``values`` is empty for strings and for very long arrays."""

    type: GGUFValueType
    count: int
    values: tuple[int | float | bool, ...] = ()


GgufValue = str | int | float | bool | GgufArray


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies: ``shape`` in numpy order (rows first), ``offset`` from the start of the file, in bytes."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    n_bytes: int


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


def read_gguf_header(data: bytes | mmap) -> GgufHeader:
    """Read the header of the GGUF file whose whole content is ``data``. Raises GgufError."""
    cursor = _Cursor(data)
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
        tensors[name] = _placed(name, shape, kind, start + offset, len(data))
    return GgufHeader(metadata, types, tensors, entries)


class _Cursor:
    """A position in the file; every read is checked against the file's end first."""

    def __init__(self, data: bytes | mmap) -> None:
        self.data = data
        self.at = 0

    def need(self, n_bytes: int, what: str) -> None:
        if n_bytes > len(self.data) - self.at:
            raise GgufError(f"the file ends within {what}: it is truncated or damaged")

    def scalar(self, fmt: str, what: str) -> Any:
        size = struct.calcsize(fmt)
        self.need(size, what)
        (value,) = struct.unpack_from(fmt, self.data, self.at)
        self.at += size
        return value

    def string(self, what: str, limit: int | None = None) -> str:
        length: int = self.scalar("<Q", what)
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
        unpack, end, at = struct.Struct("<Q").unpack_from, len(self.data) - 8, self.at
        for _ in range(count):
            if at > end:
                raise GgufError(f"the file ends within {what}: it is truncated or damaged")
            at += 8 + unpack(self.data, at)[0]
        self.at = at
        self.need(0, what)


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; return the numbers of tensors and of metadata entries."""
    if len(cursor.data) < len(_MAGIC) or cursor.data[: len(_MAGIC)] != _MAGIC:
        raise GgufError("not a GGUF file (it does not begin with 'GGUF')")
    cursor.at = len(_MAGIC)
    version = cursor.scalar("<I", "the header")
    if version not in _VERSIONS:
        endian = " (a big-endian file?)" if version & 0xFFFF == 0 and version else ""
        raise GgufError(f"GGUF version {version}{endian} is not supported; versions 2 and 3, little-endian, are")
    n_tensors, n_kv = cursor.scalar("<Q", "the header"), cursor.scalar("<Q", "the header")
    left = len(cursor.data) - cursor.at
    if n_kv * _MIN_KV_BYTES + n_tensors * _MIN_TENSOR_BYTES > left:
        raise GgufError(
            f"the header announces {n_kv} metadata entries and {n_tensors} tensors, more than {left} bytes can hold: "
            "the file is truncated or damaged"
        )
    return n_tensors, n_kv


def _value_type(raw: int, key: str) -> GGUFValueType:
    try:
        return GGUFValueType(raw)
    except ValueError:
        raise GgufError(f"{key[:80]} has the unknown value type {raw}") from None


def _value(cursor: _Cursor, key: str) -> tuple[GGUFValueType, GgufValue]:
    kind = _value_type(cursor.scalar("<I", key[:80]), key)
    if kind is GGUFValueType.STRING:
        return kind, cursor.string(key[:80])
    if kind is not GGUFValueType.ARRAY:
        return kind, cursor.scalar(_SCALARS[kind], key[:80])
    item = _value_type(cursor.scalar("<I", key[:80]), key)
    count: int = cursor.scalar("<Q", key[:80])
    if item is GGUFValueType.ARRAY:
        raise GgufError(f"{key[:80]} is an array of arrays")
    if item is GGUFValueType.STRING:
        cursor.need(count * 8, key[:80])
        cursor.skip_strings(count, key[:80])
        return kind, GgufArray(item, count)
    fmt = _SCALARS[item]
    size = count * struct.calcsize(fmt)
    cursor.need(size, key[:80])
    values: tuple[Any, ...] = ()
    if count <= _KEPT_ARRAY:
        values = struct.unpack_from(f"<{count}{fmt[1]}", cursor.data, cursor.at)
    cursor.at += size
    return kind, GgufArray(item, count, values)


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape in numpy order, raw type, offset within the data) as the file states them."""
    name = cursor.string("a tensor's name", _MAX_NAME)
    what = f"the entry of tensor {name[:80]!r}"
    n_dims = cursor.scalar("<I", what)
    if not 1 <= n_dims <= _MAX_DIMS:
        raise GgufError(f"tensor {name[:80]!r} has {n_dims} dimensions; 1 to {_MAX_DIMS} are allowed")
    dims = tuple(int(cursor.scalar("<Q", what)) for _ in range(n_dims))
    if not all(1 <= dim <= _MAX_DIM for dim in dims):
        raise GgufError(f"tensor {name[:80]!r} has the impossible shape {dims[::-1]}")
    kind: int = cursor.scalar("<I", what)
    offset: int = cursor.scalar("<Q", what)
    return name, dims[::-1], kind, offset


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
