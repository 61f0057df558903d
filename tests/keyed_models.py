"""Tiny random models that the delta path does not serve: a mixture of experts and a recurrent one, with adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

from gguf_tools import add_byte_vocabulary

Weights = dict[str, NDArray[np.float32]]

N_LAYER, N_EMBD, N_HEAD, N_FF, N_VOCAB = 2, 64, 4, 96, 320
N_EXPERT = 4
D_INNER, D_STATE, D_CONV, DT_RANK = 2 * N_EMBD, 16, 4, 8

EXPERT_MODULES = {
    "llama": ("block_sparse_moe", {"w1": "gate", "w2": "down", "w3": "up"}),
    "qwen3moe": ("mlp", {"gate_proj": "gate", "down_proj": "down", "up_proj": "up"}),
}
"""Architecture to where its Hugging Face model has the experts, and each of their modules to its kind in GGUF."""
EXPERTS = {
    f"blk.{layer}.ffn_{kind}_exps.weight": (N_EXPERT, *shape)
    for layer in range(N_LAYER)
    for kind, shape in {"gate": (N_FF, N_EMBD), "up": (N_FF, N_EMBD), "down": (N_EMBD, N_FF)}.items()
}


def moe_shapes() -> dict[str, tuple[int, ...]]:
    """Matrices of a llama model with a mixture of experts."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (N_VOCAB, N_EMBD), "output.weight": (N_VOCAB, N_EMBD)}
    for layer in range(N_LAYER):
        shapes |= {f"blk.{layer}.attn_{part}.weight": (N_EMBD, N_EMBD) for part in ("q", "k", "v", "output")}
        shapes[f"blk.{layer}.ffn_gate_inp.weight"] = (N_EXPERT, N_EMBD)
    return shapes | EXPERTS


def peft_expert_shapes(architecture: str = "llama") -> dict[str, tuple[int, int]]:
    """The experts' modules as Mixtral's Hugging Face model has them, or Qwen's."""
    block, names = EXPERT_MODULES[architecture]
    return {
        f"model.layers.{layer}.{block}.experts.{expert}.{leaf}": (N_EMBD, N_FF) if kind == "down" else (N_FF, N_EMBD)
        for layer in range(N_LAYER)
        for expert in range(N_EXPERT)
        for leaf, kind in names.items()
    }


def mamba_shapes() -> dict[str, tuple[int, ...]]:
    """Matrices of a Mamba model that its graph multiplies, and so adapters may target."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (N_VOCAB, N_EMBD), "output.weight": (N_VOCAB, N_EMBD)}
    for layer in range(N_LAYER):
        shapes[f"blk.{layer}.ssm_in.weight"] = (2 * D_INNER, N_EMBD)
        shapes[f"blk.{layer}.ssm_x.weight"] = (DT_RANK + 2 * D_STATE, D_INNER)
        shapes[f"blk.{layer}.ssm_dt.weight"] = (D_INNER, DT_RANK)
        shapes[f"blk.{layer}.ssm_out.weight"] = (N_EMBD, D_INNER)
    return shapes


def make_moe(
    path: Path, deltas: Mapping[str, NDArray[np.float32]] | None = None, *, architecture: str = "llama"
) -> Path:
    """Write a model of four experts, two of them for each token, in F32; ``deltas`` are added to its weights."""
    norms = [f"blk.{layer}.{norm}_norm.weight" for layer in range(N_LAYER) for norm in ("attn", "ffn")]
    ones = {name: np.ones(N_EMBD, np.float32) for name in [*norms, "output_norm.weight"]}
    if architecture == "qwen3moe":
        of_heads = [f"blk.{layer}.attn_{part}_norm.weight" for layer in range(N_LAYER) for part in "qk"]
        ones |= {name: np.ones(N_EMBD // N_HEAD, np.float32) for name in of_heads}

    def metadata(writer: GGUFWriter) -> None:
        writer.add_feed_forward_length(N_FF)
        writer.add_head_count(N_HEAD)
        writer.add_rope_dimension_count(N_EMBD // N_HEAD)
        writer.add_expert_count(N_EXPERT)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(N_FF)

    return _write(path, architecture, moe_shapes(), ones, metadata, deltas or {})


def make_mamba(path: Path, deltas: Mapping[str, NDArray[np.float32]] | None = None) -> Path:
    """Write a recurrent model in F32; ``deltas`` are added to its weights."""
    random = np.random.default_rng(5)
    vectors = {"output_norm.weight": np.ones(N_EMBD, np.float32)}
    for layer in range(N_LAYER):
        block = f"blk.{layer}"
        vectors[f"{block}.attn_norm.weight"] = np.ones(N_EMBD, np.float32)
        vectors[f"{block}.ssm_conv1d.weight"] = random.normal(0, 0.5, (D_INNER, D_CONV)).astype(np.float32)
        vectors[f"{block}.ssm_conv1d.bias"] = np.zeros(D_INNER, np.float32)
        vectors[f"{block}.ssm_dt.bias"] = random.normal(-2, 0.5, D_INNER).astype(np.float32)
        vectors[f"{block}.ssm_a"] = -np.tile(np.arange(1, D_STATE + 1, dtype=np.float32), (D_INNER, 1))
        vectors[f"{block}.ssm_d"] = np.ones(D_INNER, np.float32)

    def metadata(writer: GGUFWriter) -> None:
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_ssm_conv_kernel(D_CONV)
        writer.add_ssm_inner_size(D_INNER)
        writer.add_ssm_state_size(D_STATE)
        writer.add_ssm_time_step_rank(DT_RANK)

    return _write(path, "mamba", mamba_shapes(), vectors, metadata, deltas or {})


def random_pairs(shapes: Mapping[str, tuple[int, ...]], *, rank: int = 4, std: float = 0.3, seed: int = 0) -> Weights:
    """A GGUF adapter's tensors for weights of these shapes; of experts each has a pair of its own."""
    random = np.random.default_rng(seed)
    tensors = {}
    for target, (*experts, n_out, n_in) in shapes.items():
        tensors[f"{target}.lora_a"] = random.normal(0, std, (*experts, rank, n_in)).astype(np.float32)
        tensors[f"{target}.lora_b"] = random.normal(0, std, (*experts, n_out, rank)).astype(np.float32)
    return tensors


def merged(pairs: Weights, scale: float) -> Weights:
    """Target to what the pairs add to it, expert by expert; ``scale`` includes alpha over rank."""
    targets = [name.removesuffix(".lora_a") for name in pairs if name.endswith(".lora_a")]
    deltas = {}
    for target in targets:
        a, b = pairs[f"{target}.lora_a"], pairs[f"{target}.lora_b"]
        if a.ndim == 2:
            deltas[target] = np.float32(scale) * (b @ a)
        else:
            deltas[target] = np.stack([np.float32(scale) * (b[i] @ a[i]) for i in range(len(a))])
    return deltas


def _write(
    path: Path,
    architecture: str,
    shapes: Mapping[str, tuple[int, ...]],
    vectors: Weights,
    metadata: Callable[[GGUFWriter], None],
    deltas: Mapping[str, NDArray[np.float32]],
) -> Path:
    random = np.random.default_rng(0)
    writer = GGUFWriter(path, architecture)
    writer.add_type("model")
    writer.add_name("Tiny")
    writer.add_block_count(N_LAYER)
    writer.add_context_length(512)
    writer.add_embedding_length(N_EMBD)
    writer.add_layer_norm_rms_eps(1e-5)
    metadata(writer)
    add_byte_vocabulary(writer)
    for name, shape in shapes.items():
        values = random.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
        writer.add_tensor(name, values + deltas.get(name, np.float32(0)))
    for name, values in vectors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
