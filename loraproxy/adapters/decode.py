"""The values of stored tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from loraproxy.adapters.checks import Refused
from loraproxy.adapters.stored import StoredTensor

Buffer = bytes | memoryview

_F16_VALUES = np.arange(1 << 16, dtype="<u2").view("<f2").astype(np.float32)
_CHUNK = 1 << 16
"""Values looked up at a time: the indices that numpy makes of them stay in a processor's cache."""


def decode(data: Buffer, tensor: StoredTensor) -> NDArray[np.float32]:
    """The tensor's values as float32, in its shape. Raises Refused for a type that cannot be read.

    float32 that lies on its boundary is a view of ``data``, the rest a copy. Damaged blocks may decode to
    infinities, so the caller must check.
    """
    n, at, kind = tensor.n_values, tensor.offset, tensor.type
    values: NDArray[Any]
    if kind is GGMLQuantizationType.F32:
        values = np.frombuffer(data, "<f4", n, at)
        if not values.flags.aligned:
            values = values.copy()
    elif kind is GGMLQuantizationType.F16:
        values = _from_f16(np.frombuffer(data, "<u2", n, at))
    elif kind is GGMLQuantizationType.BF16:
        halves = np.zeros((n, 2), "<u2")  # a bfloat16 is the upper half of a float32
        halves[:, 1] = np.frombuffer(data, "<u2", n, at)
        values = halves.view("<f4")
    else:
        values = _dequantized(np.frombuffer(data, np.uint8, tensor.n_bytes, at), tensor)
    return values.reshape(tensor.shape)


def _from_f16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """float16, given as its bits, to float32: looked up, which takes a quarter of the time of numpy's conversion."""
    values = np.empty(len(bits), np.float32)
    for at in range(0, len(bits), _CHUNK):
        _F16_VALUES.take(bits[at : at + _CHUNK], out=values[at : at + _CHUNK], mode="wrap")
    return values


def _dequantized(raw: NDArray[np.uint8], tensor: StoredTensor) -> NDArray[Any]:
    try:
        with np.errstate(all="ignore"):
            values: NDArray[Any] = dequantize(raw.reshape(tensor.n_values // tensor.shape[-1], -1), tensor.type)
    except NotImplementedError:
        raise Refused(
            f"tensor {tensor.name} has the type {tensor.type.name}, which cannot be read; "
            "convert the adapter with --outtype f16"
        ) from None
    return np.ascontiguousarray(values, np.float32)


def all_finite(values: NDArray[np.float32]) -> bool:
    """True if no value is NaN or infinite.

    A sum is not finite as soon as one value is not, and needs one pass and no memory; only where it overflows
    is a second look needed.
    """
    with np.errstate(all="ignore"):
        return bool(np.isfinite(np.add.reduce(values, axis=None))) or bool(np.isfinite(values).all())
