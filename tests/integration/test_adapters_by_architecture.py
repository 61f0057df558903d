"""PEFT adapters on tiny models of every architecture, against models whose weights had them merged in by formula."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from gguf_tools import make_peft_folder, peft_config, random_peft_tensors
from llama_cpp_logits import PROMPT, divergence, logits
from loraproxy import _native
from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.gguf_write import write_gguf_adapter
from loraproxy.adapters.read import read_adapter
from loraproxy.adapters.tensors import Adapter
from loraproxy.config import WorkerSettings
from loraproxy.worker.model import Model
from loraproxy.worker.runtime import Runtime
from tiny_models import (
    BY_NAME,
    KINDS,
    N_FF,
    N_HEAD,
    N_HEAD_KV,
    Kind,
    Weights,
    gguf_weights,
    module_shapes,
    random_weights,
    write_model,
)

EXACT = 1e-4
"""Largest divergence of two computations of the same in float32; the delta path holds its weights in f16."""
CHANGED = 0.01
"""Least divergence that an adapter makes, so that nothing at all would be noticed."""
CONFIG = peft_config(lora_alpha=6, alpha_pattern={"v_proj": 9, r"layers\.1\.mlp\.up_proj": 3}, use_rslora=True)


def alpha_of(module: str) -> float:
    """What CONFIG says, without its patterns."""
    return 9.0 if module.endswith(".v_proj") else 3.0 if module == "model.layers.1.mlp.up_proj" else 6.0


def random_adapter(shapes: Mapping[str, tuple[int, int]]) -> tuple[Weights, Weights]:
    """PEFT's tensors with another rank for each module, and each module's change of its weight by the formula."""
    tensors = random_peft_tensors(shapes, ranks={module: 1 + 5 * i % 9 for i, module in enumerate(shapes)}, std=0.1)
    deltas = {}
    for module in shapes:
        embedding = module == "model.embed_tokens"
        a, b = (
            tensors[f"base_model.model.{module}.lora_{f'embedding_{half}' if embedding else f'{half}.weight'}"]
            for half in "AB"
        )
        delta = np.float32(alpha_of(module) / np.sqrt(a.shape[0])) * (b @ a)
        deltas[module] = delta.T if embedding else delta
    return tensors, deltas


def last_logits(path: Path, adapter: Adapter | None) -> NDArray[np.float32]:
    """The delta path's logits after PROMPT."""
    settings = WorkerSettings(model=path, socket=Path("unused"), parallel=1, ctx_size=256, threads=1)
    runtime = Runtime(Model(path), settings)
    try:
        if adapter is not None:
            runtime.delta.insert(0, runtime.delta.prepare(adapter))
            assert runtime.delta.nbytes(0) == adapter.summary.resident_bytes
        sets = [] if adapter is None else [(0, 1.0)]
        runtime.prefill(0, PROMPT[:-1], 0, sets, False)
        runtime.step([PROMPT[-1]], [len(PROMPT) - 1], 0, [sets])
        return _native.logits(runtime.address, 0)
    finally:
        runtime.close()


def check(
    folder: Path, kind: Kind, tensors: Weights, merged: Weights, base: Weights, *, fuse_qkv: bool = False
) -> Adapter:
    """The adapter on ``base`` equals ``merged``, in llama.cpp's LoRA graph and in the delta path."""
    base_path = write_model(folder / "base.gguf", kind, gguf_weights(kind, base, fuse_qkv=fuse_qkv))
    merged_path = write_model(folder / "merged.gguf", kind, gguf_weights(kind, merged, fuse_qkv=fuse_qkv))
    model = BaseModel.from_gguf(base_path)
    adapter = read_adapter("x", make_peft_folder(folder / "peft", tensors, CONFIG), model)
    write_gguf_adapter(adapter, model, folder / "x.gguf", "f32")
    expected = logits(merged_path)
    assert divergence(logits(base_path, folder / "x.gguf"), expected) < EXACT
    assert divergence(logits(base_path), expected) > CHANGED
    assert divergence(last_logits(base_path, adapter), last_logits(merged_path, None)) < EXACT
    return adapter


def merge(weights: Weights, deltas: Mapping[str, NDArray[np.float32]]) -> Weights:
    return {module: values + deltas.get(module, 0) for module, values in weights.items()}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.architecture)
def test_an_adapter_of_every_matrix_equals_merged_weights(tmp_path: Path, kind: Kind) -> None:
    shapes = module_shapes(kind)
    if kind.tied:  # merged weights would change the head as well
        del shapes["model.embed_tokens"]
    tensors, deltas = random_adapter(shapes)
    weights = random_weights(kind)
    adapter = check(tmp_path, kind, tensors, merge(weights, deltas), weights)
    assert len(adapter.tensors) == len(shapes)


def split_shapes(kind: Kind) -> dict[str, tuple[int, int]]:
    """The modules that a fused model would have were it not fused."""
    return {
        module: shape
        for module, shape in module_shapes(Kind(kind.architecture, head=kind.head)).items()
        if "layers." in module
    }


def test_split_modules_on_a_fused_base_equal_merged_weights(tmp_path: Path) -> None:
    kind = BY_NAME["phi3"]
    shapes = split_shapes(kind)
    del shapes["model.layers.1.self_attn.k_proj"], shapes["model.layers.1.mlp.gate_proj"]
    tensors, deltas = random_adapter(shapes)
    weights = random_weights(kind)
    merged = merge(weights, deltas)
    q, kv = N_HEAD * kind.head, N_HEAD_KV * kind.head
    rows = {"q_proj": (0, q), "k_proj": (q, q + kv), "v_proj": (q + kv, q + 2 * kv)}
    rows |= {"gate_proj": (0, N_FF), "up_proj": (N_FF, 2 * N_FF)}
    for module, delta in deltas.items():
        parent, leaf = module.rsplit(".", 1)
        if leaf in rows:
            begin, end = rows[leaf]
            fused = f"{parent}.{'gate_up_proj' if 'mlp' in parent else 'qkv_proj'}"
            merged[fused] = merged[fused].copy()
            merged[fused][begin:end] += delta
    adapter = check(tmp_path, kind, tensors, merged, weights)
    ranks = {tensor.target: tensor.rank for tensor in adapter.tensors}
    assert ranks["blk.0.attn_qkv.weight"] == sum(
        tensors[f"base_model.model.model.layers.0.self_attn.{part}_proj.lora_A.weight"].shape[0] for part in "qkv"
    )


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_fused_modules_on_a_split_base_equal_merged_weights(tmp_path: Path, architecture: str) -> None:
    kind = BY_NAME[architecture]
    shapes = module_shapes(Kind(architecture, fused=True, head=kind.head))
    tensors, deltas = random_adapter({module: shape for module, shape in shapes.items() if "layers." in module})
    weights = random_weights(kind)
    q, kv = N_HEAD * kind.head, N_HEAD_KV * kind.head
    for module in [module for module in deltas if module.endswith(("qkv_proj", "gate_up_proj"))]:
        parent, leaf = module.rsplit(".", 1)
        names = ("q_proj", "k_proj", "v_proj") if leaf == "qkv_proj" else ("gate_proj", "up_proj")
        cuts = (q, q + kv) if leaf == "qkv_proj" else (N_FF,)
        for name, part in zip(names, np.split(deltas.pop(module), cuts), strict=True):
            deltas[f"{parent}.{name}"] = part
    adapter = check(tmp_path, kind, tensors, merge(weights, deltas), weights)
    assert len(adapter.tensors) == 2 * 7


@pytest.mark.parametrize("fused_adapter", [False, True], ids=["split adapter", "fused adapter"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_base_that_was_converted_with_fused_qkv(tmp_path: Path, architecture: str, fused_adapter: bool) -> None:
    kind = BY_NAME[architecture]
    shapes = module_shapes(Kind(architecture, fused=fused_adapter, head=kind.head))
    shapes = {module: shape for module, shape in shapes.items() if "self_attn" in module}
    tensors, deltas = random_adapter(shapes)
    weights = random_weights(kind)
    q, kv = N_HEAD * kind.head, N_HEAD_KV * kind.head
    for module in [module for module in deltas if module.endswith("qkv_proj")]:
        for name, part in zip("qkv", np.split(deltas.pop(module), (q, q + kv)), strict=True):
            deltas[module.replace("qkv_proj", f"{name}_proj")] = part
    check(tmp_path, kind, tensors, merge(weights, deltas), weights, fuse_qkv=True)
