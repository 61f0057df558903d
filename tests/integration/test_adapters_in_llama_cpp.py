"""What the readers and the writer make of an adapter, held against llama.cpp itself on a tiny random model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from gguf_tools import (
    make_gguf_adapter,
    make_peft_folder,
    make_tiny_llama,
    peft_config,
    random_peft_tensors,
    tiny_llama_shapes,
)
from llama_cpp_logits import logits
from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.gguf_write import AdapterDtype, write_gguf_adapter
from loraproxy.adapters.read import read_adapter
from loraproxy.adapters.tensors import Adapter, Op

SHAPES = {**tiny_llama_shapes(), "lm_head": (320, 64)}


def merged_deltas(adapter: Adapter, scale: float) -> dict[str, NDArray[np.float32]]:
    """GGUF tensor name to what the adapter adds to it."""
    deltas = {}
    for tensor in adapter.tensors:
        delta = np.float32(scale * tensor.scale) * (tensor.b @ tensor.a)
        deltas[tensor.target] = delta.T if tensor.op is Op.GET_ROWS else delta
    return deltas


def peft_adapter(folder: Path, base: BaseModel) -> Adapter:
    """A random adapter of every matrix, each with a rank of its own, rank-stabilised and with an alpha pattern."""
    ranks = {module: 1 + 7 * i % 33 for i, module in enumerate(SHAPES)}
    config = peft_config(use_rslora=True, lora_alpha=2, alpha_pattern={"v_proj": 5, r"layers\.1\..*": 1})
    return read_adapter("x", make_peft_folder(folder, random_peft_tensors(SHAPES, ranks=ranks), config), base)


def distance(left: NDArray[np.float32], right: NDArray[np.float32]) -> float:
    return float(np.abs(left - right).max() / right.std())


@pytest.mark.parametrize(("dtype", "error"), [("f32", 1e-4), ("f16", 5e-3), ("bf16", 5e-2), ("q8_0", 5e-2)])
def test_llama_cpp_applies_a_written_adapter_as_if_it_were_merged(tmp_path: Path, dtype: AdapterDtype, error: float):
    base = BaseModel.from_gguf(make_tiny_llama(tmp_path / "base.gguf", tied=False))
    adapter = peft_adapter(tmp_path / "peft", base)
    write_gguf_adapter(adapter, base, tmp_path / "x.gguf", dtype)
    merged = make_tiny_llama(tmp_path / "merged.gguf", tied=False, deltas=merged_deltas(adapter, 0.5))
    expected = logits(merged)
    assert distance(logits(base.path, tmp_path / "x.gguf", 0.5), expected) < error
    assert distance(logits(base.path), expected) > 0.5


def test_llama_cpp_and_the_reader_agree_on_the_scale_of_a_file_with_alpha(tmp_path: Path):
    base = BaseModel.from_gguf(make_tiny_llama(tmp_path / "base.gguf", tied=False))
    random = np.random.default_rng(3)
    tensors = {}
    for target, (n_out, n_in) in {"blk.1.ffn_up.weight": (96, 64), "blk.0.attn_output.weight": (64, 64)}.items():
        tensors[f"{target}.lora_a"] = random.normal(0, 0.3, (8, n_in)).astype(np.float32)
        tensors[f"{target}.lora_b"] = random.normal(0, 0.3, (n_out, 8)).astype(np.float32)
    path = make_gguf_adapter(tmp_path / "x.gguf", tensors, alpha=20.0)
    adapter = read_adapter("x", path, base)
    merged = make_tiny_llama(tmp_path / "merged.gguf", tied=False, deltas=merged_deltas(adapter, 1.0))
    assert {tensor.scale for tensor in adapter.tensors} == {2.5}
    assert distance(logits(base.path, path), logits(merged)) < 1e-4
