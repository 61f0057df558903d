"""Tiny random models of several architectures, from weights as Hugging Face lays them out.

What each architecture's weights need on their way to GGUF is written here once more, as plain loops over rows, so
that a test can compare the product's adapters with merged models that know nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

from gguf_tools import add_byte_vocabulary

Weights = dict[str, NDArray[np.float32]]

N_LAYER, N_EMBD, N_HEAD, N_HEAD_KV, N_FF, N_VOCAB = 2, 64, 4, 2, 96, 320
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _nothing(_: GGUFWriter) -> None:
    """No metadata but what all have."""


def _gemma2(writer: GGUFWriter) -> None:
    writer.add_attn_logit_softcapping(50.0)
    writer.add_final_logit_softcapping(30.0)
    writer.add_sliding_window(16)


def _granite(writer: GGUFWriter) -> None:
    writer.add_logit_scale(2.0)
    writer.add_residual_scale(0.8)
    writer.add_embedding_scale(3.0)
    writer.add_attention_scale(0.2)


@dataclass(frozen=True)
class Kind:
    """An architecture's special features.

    interleaved: the converter interleaves the rows of q and k. fused: the model has qkv_proj and gate_up_proj.
    """

    architecture: str
    interleaved: bool = False
    fused: bool = False
    tied: bool = False
    head: int = N_EMBD // N_HEAD
    biases: bool = False
    qk_norms: bool = False
    post_norms: bool = False
    metadata: Callable[[GGUFWriter], None] = _nothing


KINDS = (
    Kind("llama", interleaved=True),
    Kind("mistral3", interleaved=True, head=24),
    Kind("smollm3", interleaved=True),
    Kind("granite", interleaved=True, metadata=_granite),
    Kind("qwen2", biases=True),
    Kind("qwen3", qk_norms=True, head=24),
    Kind("gemma", tied=True, head=24),
    Kind("gemma2", tied=True, post_norms=True, head=24, metadata=_gemma2),
    Kind("gemma3", tied=True, post_norms=True, qk_norms=True, head=24),
    Kind("phi3", fused=True),
)
BY_NAME = {kind.architecture: kind for kind in KINDS}


def module_shapes(kind: Kind) -> dict[str, tuple[int, int]]:
    """Every matrix of the Hugging Face model: module name to (n_out, n_in)."""
    q, kv = N_HEAD * kind.head, N_HEAD_KV * kind.head
    shapes = {"model.embed_tokens": (N_VOCAB, N_EMBD)}
    for layer in range(N_LAYER):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        if kind.fused:
            shapes[f"{attention}.qkv_proj"] = (q + 2 * kv, N_EMBD)
            shapes[f"{mlp}.gate_up_proj"] = (2 * N_FF, N_EMBD)
        else:
            shapes.update({f"{attention}.q_proj": (q, N_EMBD), f"{attention}.k_proj": (kv, N_EMBD)})
            shapes.update({f"{attention}.v_proj": (kv, N_EMBD)})
            shapes.update({f"{mlp}.gate_proj": (N_FF, N_EMBD), f"{mlp}.up_proj": (N_FF, N_EMBD)})
        shapes[f"{attention}.o_proj"] = (N_EMBD, q)
        shapes[f"{mlp}.down_proj"] = (N_EMBD, N_FF)
    if not kind.tied:
        shapes["lm_head"] = (N_VOCAB, N_EMBD)
    return shapes


def random_weights(kind: Kind, seed: int = 0) -> Weights:
    """Random matrices of the Hugging Face model, by module."""
    random = np.random.default_rng(seed)
    return {
        module: random.normal(0, shape[1] ** -0.5, shape).astype(np.float32)
        for module, shape in module_shapes(kind).items()
    }


def gguf_weights(kind: Kind, weights: Mapping[str, NDArray[np.float32]], *, fuse_qkv: bool = False) -> Weights:
    """The matrices as GGUF has them, by tensor; with ``fuse_qkv`` as llama.cpp's converter makes them with that."""
    tensors: Weights = {}
    for module, values in weights.items():
        name = {"model.embed_tokens": "token_embd", "lm_head": "output"}.get(module)
        if name is None:
            _, _, layer, rest = module.split(".", 3)
            name = f"blk.{layer}.{GGUF_NAMES[rest]}"
        if kind.interleaved and module.endswith(("q_proj", "k_proj")):
            values = interleaved(values, N_HEAD if module.endswith("q_proj") else N_HEAD_KV)
        tensors[f"{name}.weight"] = values
    if fuse_qkv:
        for layer in range(N_LAYER):
            parts = [tensors.pop(f"blk.{layer}.attn_{part}.weight") for part in "qkv"]
            tensors[f"blk.{layer}.attn_qkv.weight"] = np.concatenate(parts)
    return tensors


def interleaved(rows: NDArray[np.float32], n_head: int) -> NDArray[np.float32]:
    """Within each head, row 2i of the result is row i of the first half, row 2i + 1 is row i of the second."""
    size = rows.shape[0] // n_head
    order = [
        head * size + half * (size // 2) + i for head in range(n_head) for i in range(size // 2) for half in (0, 1)
    ]
    return rows[order]


def write_model(path: Path, kind: Kind, tensors: Mapping[str, NDArray[np.float32]]) -> Path:
    """Write a model that llama.cpp loads, in F32, with random norms and biases that are the same for every call."""
    random = np.random.default_rng(99)
    writer = GGUFWriter(path, kind.architecture)
    writer.add_type("model")
    writer.add_name("Tiny")
    writer.add_block_count(N_LAYER)
    writer.add_context_length(512)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_key_length(kind.head)
    writer.add_value_length(kind.head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(kind.head)
    kind.metadata(writer)
    add_byte_vocabulary(writer)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    for name, size in _vectors(kind).items():
        center = 1.0 if name.endswith("weight") else 0.0
        writer.add_tensor(name, random.normal(center, 0.1, size).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _vectors(kind: Kind) -> dict[str, int]:
    """Norms and biases: tensor name to length."""
    vectors = {"output_norm.weight": N_EMBD}
    for layer in range(N_LAYER):
        block = f"blk.{layer}"
        vectors.update({f"{block}.attn_norm.weight": N_EMBD, f"{block}.ffn_norm.weight": N_EMBD})
        if kind.post_norms:
            vectors.update({f"{block}.post_attention_norm.weight": N_EMBD, f"{block}.post_ffw_norm.weight": N_EMBD})
        if kind.qk_norms:
            vectors.update({f"{block}.attn_q_norm.weight": kind.head, f"{block}.attn_k_norm.weight": kind.head})
        if kind.biases:
            vectors.update({f"{block}.attn_q.bias": N_HEAD * kind.head})
            vectors.update({f"{block}.attn_{part}.bias": N_HEAD_KV * kind.head for part in "kv"})
    return vectors
