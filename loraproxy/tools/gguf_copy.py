"""Writing a GGUF file that is another one with some tensors changed. Format: docs/gguf.md of ggml."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedWriter
from mmap import mmap

import numpy as np
from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from loraproxy.adapters.gguf_header import GgufHeader, GgufTensor
from loraproxy.tools.ggml import row_bytes

Bytes = bytes | memoryview

_VERSION = 3
_SLICE = 8 << 20


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written: ``shape`` in numpy order, ``data`` yields its bytes in order, a little at a time."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    data: Callable[[], Iterator[Bytes]]

    @property
    def n_bytes(self) -> int:
        """The size of the tensor's data."""
        return row_bytes(self.type, self.shape[-1]) * int(np.prod(self.shape[:-1], dtype=np.int64))


def copied(source: mmap, tensor: GgufTensor, name: str | None = None) -> NewTensor:
    """``tensor`` of the file ``source`` byte for byte, under another name if one is given."""

    def data() -> Iterator[Bytes]:
        end = tensor.offset + tensor.n_bytes
        for at in range(tensor.offset, end, _SLICE):
            yield source[at : min(at + _SLICE, end)]

    return NewTensor(name or tensor.name, tensor.shape, tensor.type, data)


def metadata_entries(source: mmap, header: GgufHeader, texts: Mapping[str, str]) -> list[bytes]:
    """The file's metadata entries byte for byte and in order, but for ``texts``, which replace or follow them."""
    entries = {key: source[start:end] for key, (start, end) in header.entries.items()}
    entries.update({key: _string(key) + struct.pack("<I", GGUFValueType.STRING) + _string(texts[key]) for key in texts})
    return list(entries.values())


def file_size(entries: Sequence[bytes], tensors: Sequence[NewTensor], alignment: int) -> int:
    """The bytes that :func:`write_gguf` writes."""
    head = len(_head(entries, tensors, alignment))
    return head + sum(_aligned(tensor.n_bytes, alignment) for tensor in tensors)


def alignment_of(header: GgufHeader) -> int:
    """The file's alignment in bytes, a power of two."""
    return header.count("general.alignment") or GGUF_DEFAULT_ALIGNMENT


def write_gguf(
    file: BufferedWriter,
    entries: Sequence[bytes],
    tensors: Sequence[NewTensor],
    alignment: int,
    written: Callable[[int, str], None],
) -> None:
    """Write a whole GGUF file; ``written`` is told how many bytes of which tensor are done. Raises OSError."""
    file.write(_head(entries, tensors, alignment))
    for tensor in tensors:
        size = 0
        for piece in tensor.data():
            size += file.write(piece)
            written(len(piece), tensor.name)
        if size != tensor.n_bytes:
            raise AssertionError(f"{tensor.name}: {size} bytes instead of {tensor.n_bytes}")
        file.write(bytes(_aligned(size, alignment) - size))


def _head(entries: Sequence[bytes], tensors: Sequence[NewTensor], alignment: int) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", _VERSION, len(tensors), len(entries)), *entries]
    offset = 0
    for tensor in tensors:
        dims = tensor.shape[::-1]
        numbers = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor.type, offset)
        parts += [_string(tensor.name), numbers]
        offset += _aligned(tensor.n_bytes, alignment)
    head = b"".join(parts)
    return head.ljust(_aligned(len(head), alignment), b"\0")


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
