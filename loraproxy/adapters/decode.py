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
        values = np.frombuffer(data, "<f2", n, at).astype(np.float32)
    elif kind is GGMLQuantizationType.BF16:
        values = (np.frombuffer(data, "<u2", n, at).astype("<u4") << 16).view("<f4")
    else:
        values = _dequantized(np.frombuffer(data, np.uint8, tensor.n_bytes, at), tensor)
    return values.reshape(tensor.shape)


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
