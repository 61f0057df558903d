"""The base model's quantised products: right for every format, and the same bits whatever shares the call."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from gguf_tools import make_tiny_llama
from loraproxy import _native
from loraproxy.config import WorkerSettings
from loraproxy.worker.model import Model
from loraproxy.worker.runtime import Runtime

FORMATS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

pytestmark = pytest.mark.skipif(not _native.Delta.has_kernels("avx2"), reason="only x86-64 with AVX2 has these kernels")


def quantized(name: str, values: NDArray[np.float32]) -> tuple[bytes, NDArray[np.float32]]:
    """``values`` (n_out, n_in) as llama.cpp itself quantises them, and what that stands for."""
    kind = GGMLQuantizationType[name]
    block, size = GGML_QUANT_SIZES[kind]
    buffer = ctypes.create_string_buffer(values.size // block * size)
    function = llama_cpp.llama_cpp._lib.ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    function(int(kind), values.ctypes.data, buffer, 0, *values.shape, None)
    raw = np.frombuffer(buffer.raw, np.uint8).reshape(len(values), -1)
    return buffer.raw, dequantize(raw, kind).reshape(values.shape)


@pytest.mark.parametrize("n_out", [1, 7, 8, 45])
@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_that_of_the_dequantised_weight(name: str, n_out: int) -> None:
    random = np.random.default_rng(n_out)
    # columns of very different size: a wrong scale or a wrong place shows
    weights = random.normal(0, 1, (n_out, 768)).astype(np.float32) * np.geomspace(0.01, 10, 768, dtype=np.float32)
    raw, meant = quantized(name, weights)
    x = random.normal(0, 1, (3, 768)).astype(np.float32)
    expected = x.astype(np.float64) @ meant.T.astype(np.float64)
    found = _native.base_product(int(GGMLQuantizationType[name]), raw, n_out, x)
    # all that is lost is x in 8 bits: its error is below 0.5 / 127 of the largest of 32 values
    bound = np.abs(x).reshape(3, -1, 32).max(2) @ np.abs(meant).reshape(n_out, -1, 32).sum(2).T / 254
    assert np.all(np.abs(found - expected) <= bound)
    assert np.abs(found - expected).mean() < 0.01 * np.abs(expected).mean()


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_has_the_same_bits_alone_and_among_others(name: str) -> None:
    random = np.random.default_rng(1)
    raw, _ = quantized(name, random.normal(0, 1, (21, 512)).astype(np.float32))
    x = random.normal(0, 1, (70, 512)).astype(np.float32)
    kind = int(GGMLQuantizationType[name])
    together = _native.base_product(kind, raw, 21, x)
    for n in (1, 2, 31, 33):
        part = _native.base_product(kind, raw, 21, np.ascontiguousarray(x[:n]))
        np.testing.assert_array_equal(part, together[:n])
    last = _native.base_product(kind, raw, 21, np.ascontiguousarray(x[-1:]))
    np.testing.assert_array_equal(last[0], together[-1])


@pytest.mark.parametrize("name", FORMATS)
def test_extreme_weights_and_inputs_come_out_as_they_are(name: str) -> None:
    raw, meant = quantized(name, np.full((8, 256), -1.0, np.float32))
    x = np.zeros((3, 256), np.float32)
    x[0], x[1] = 1e4, -1e4
    found = _native.base_product(int(GGMLQuantizationType[name]), raw, 8, x)
    np.testing.assert_allclose(found, x @ meant.T, rtol=1e-5)


def test_what_is_not_finite_stays_so() -> None:
    raw, _ = quantized("Q4_1", np.ones((8, 32), np.float32))
    x = np.ones((2, 32), np.float32)
    x[0, 3], x[1, 5] = np.nan, np.inf
    assert not np.isfinite(_native.base_product(int(GGMLQuantizationType.Q4_1), raw, 8, x)).any()


def test_sizes_that_do_not_fit_are_refused() -> None:
    x = np.ones((1, 32), np.float32)
    with pytest.raises(ValueError, match="do"):
        _native.base_product(int(GGMLQuantizationType.Q4_1), b"\0" * 19, 1, x)
    with pytest.raises(ValueError, match="no kernel"):
        _native.base_product(int(GGMLQuantizationType.F16), b"\0" * 64, 1, x)
    with pytest.raises(ValueError, match="no kernel"):
        _native.base_product(9999, b"\0" * 64, 1, x)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_model_says_the_same_with_our_products_and_with_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "tiny.gguf", n_embd=64, n_ff=96, dtype=GGMLQuantizationType[name])
    logits = []
    for fast in (True, False):
        settings = WorkerSettings(
            model=path, socket=Path("unused"), parallel=2, ctx_size=512, threads=2, fast_products=fast
        )
        runtime = Runtime(Model(path), settings)
        assert (runtime.delta.native.own_products > 0) is fast
        runtime.prefill(0, [1, 290, 40, 300, 41], 0, [], True)
        logits.append(_native.logits(runtime.address, -1))
        runtime.close()
    # both round x to 8 bits, each a little differently; a wrong product would leave nothing alike
    assert np.corrcoef(logits[0], logits[1])[0, 1] > 0.999
