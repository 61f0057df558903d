"""Rows of weights between ggml's types and float32, by llama.cpp's own code.

``ggml_get_type_traits`` and ``ggml_quantize_chunk`` are public (ggml.h); the release of llama.cpp is the one that
llama-cpp-python carries, which the package's requirements pin.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from llama_cpp._ggml import libggml
from numpy.typing import NDArray

NEEDS_IMATRIX = frozenset({GGMLQuantizationType.IQ2_XXS, GGMLQuantizationType.IQ2_XS, GGMLQuantizationType.IQ1_S})
"""Types that ggml cannot write without an importance matrix (ggml_quantize_requires_imatrix)."""

_NOT_WEIGHTS = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"}
WRITABLE = frozenset(kind for kind in GGMLQuantizationType if kind.name not in _NOT_WEIGHTS) - NEEDS_IMATRIX
"""Types that weights are stored in and that ggml_quantize_chunk can write."""

_TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class _TypeTraits(ctypes.Structure):
    """The beginning of ``struct ggml_type_traits``."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
    )


@lru_cache
def _to_float(kind: GGMLQuantizationType) -> Any:
    get = libggml.ggml_get_type_traits
    get.argtypes, get.restype = [ctypes.c_int], ctypes.POINTER(_TypeTraits)
    traits = get(kind.value).contents
    if (traits.blck_size, traits.type_size) != GGML_QUANT_SIZES[kind]:
        raise AssertionError(f"llama.cpp and the gguf package disagree about the blocks of {kind.name}")
    return _TO_FLOAT(traits.to_float)


@lru_cache
def _quantize_chunk() -> Any:
    quantize = libggml.ggml_quantize_chunk
    numbers = [ctypes.c_int64] * 3
    quantize.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *numbers, ctypes.c_void_p]
    quantize.restype = ctypes.c_size_t
    return quantize


def row_bytes(kind: GGMLQuantizationType, n_columns: int) -> int:
    """The bytes of one row of ``n_columns`` values, which divide into the type's blocks."""
    block, size = GGML_QUANT_SIZES[kind]
    return int(n_columns // block * size)


def decode_rows(raw: NDArray[np.uint8], kind: GGMLQuantizationType, n_columns: int) -> NDArray[np.float32]:
    """Whole rows of a WRITABLE ``kind``, as bytes, to float32 of shape (rows, n_columns)."""
    n_rows = raw.size // row_bytes(kind, n_columns)
    if kind is GGMLQuantizationType.F32:
        return raw.view("<f4").reshape(n_rows, n_columns)
    values = np.empty((n_rows, n_columns), np.float32)
    raw = np.ascontiguousarray(raw)
    _to_float(kind)(raw.ctypes.data, values.ctypes.data, values.size)
    return values


def encode_rows(values: NDArray[np.float32], kind: GGMLQuantizationType) -> NDArray[np.uint8]:
    """Float32 rows of shape (rows, columns) as the bytes of a WRITABLE ``kind``; columns divide into its blocks."""
    n_rows, n_columns = values.shape
    raw = np.empty(n_rows * row_bytes(kind, n_columns), np.uint8)
    values = np.ascontiguousarray(values, np.float32)
    _quantize_chunk()(kind.value, values.ctypes.data, raw.ctypes.data, 0, n_rows, n_columns, None)
    return raw
