"""Tiny random models and adapters, as the files that real tools write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, TokenType
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.numpy import save

BF16 = "BF16"


def byte_vocabulary() -> tuple[list[bytes], list[float], list[int]]:
    """A SentencePiece vocabulary of 320 tokens: control tokens, every byte, and printable ASCII characters."""
    control = [b"<unk>", b"<s>", b"</s>"]
    every_byte = [f"<0x{byte:02X}>".encode() for byte in range(256)]
    space = "▁".encode()  # SentencePiece's mark for a space, not an underscore
    normal = [space, *(bytes([c]) for c in range(33, 93))]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    types += [TokenType.BYTE] * len(every_byte) + [TokenType.NORMAL] * len(normal)
    tokens = control + every_byte + normal
    return tokens, [-float(i) for i in range(len(tokens))], [int(kind) for kind in types]


def add_byte_vocabulary(writer: GGUFWriter) -> None:
    """Give the model that ``writer`` writes the vocabulary of :func:`byte_vocabulary`."""
    tokens, scores, types = byte_vocabulary()
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def tiny_llama_shapes(
    *, n_layer: int = 2, n_embd: int = 64, n_head: int = 4, n_head_kv: int = 2, n_ff: int = 96, n_vocab: int = 320
) -> dict[str, tuple[int, int]]:
    """Hugging Face module name to (n_out, n_in), for the matrices of a llama model without its head."""
    head = n_embd // n_head
    shapes = {"model.embed_tokens": (n_vocab, n_embd)}
    for i in range(n_layer):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        shapes[f"{attention}.q_proj"] = (n_head * head, n_embd)
        shapes[f"{attention}.k_proj"] = (n_head_kv * head, n_embd)
        shapes[f"{attention}.v_proj"] = (n_head_kv * head, n_embd)
        shapes[f"{attention}.o_proj"] = (n_embd, n_head * head)
        shapes[f"{mlp}.gate_proj"] = (n_ff, n_embd)
        shapes[f"{mlp}.up_proj"] = (n_ff, n_embd)
        shapes[f"{mlp}.down_proj"] = (n_embd, n_ff)
    return shapes


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(module: str) -> str:
    """``model.layers.0.mlp.up_proj`` to ``blk.0.ffn_up.weight``."""
    whole = {"model.embed_tokens": "token_embd.weight", "lm_head": "output.weight"}
    if module in whole:
        return whole[module]
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.weight"


def make_tiny_llama(
    path: Path,
    *,
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ff: int = 96,
    tied: bool = True,
    architecture: str = "llama",
    dtype: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    deltas: Mapping[str, NDArray[np.float32]] | None = None,
    seed: int = 0,
) -> Path:
    """Write a random model of 320 tokens that llama.cpp loads.

    ``metadata`` overrides head counts with arrays; ``deltas`` (by GGUF name) are added to the random weights.
    """
    random = np.random.default_rng(seed)
    tokens, _, _ = byte_vocabulary()
    writer = GGUFWriter(path, architecture)
    writer.add_type("model")
    writer.add_name("Tiny")
    writer.add_block_count(n_layer)
    writer.add_context_length(512)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count((metadata or {}).get("head_count", n_head))
    writer.add_head_count_kv((metadata or {}).get("head_count_kv", n_head_kv))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(n_embd // n_head)
    add_byte_vocabulary(writer)
    shapes = tiny_llama_shapes(
        n_layer=n_layer, n_embd=n_embd, n_head=n_head, n_head_kv=n_head_kv, n_ff=n_ff, n_vocab=len(tokens)
    )
    if not tied:
        shapes["lm_head"] = (len(tokens), n_embd)
    for module, shape in shapes.items():
        values = random.normal(0, shape[1] ** -0.5, shape).astype(np.float32)
        values += (deltas or {}).get(gguf_name(module), 0)
        writer.add_tensor(gguf_name(module), quantize(values, dtype), raw_dtype=dtype)
    norms = ["output_norm"] + [f"blk.{i}.{norm}" for i in range(n_layer) for norm in ("attn_norm", "ffn_norm")]
    for norm in norms:
        writer.add_tensor(f"{norm}.weight", np.ones(n_embd, np.float32))
    _finish(writer)
    return path


def random_peft_tensors(
    shapes: Mapping[str, tuple[int, int]], *, ranks: Mapping[str, int] | int = 4, std: float = 0.2, seed: int = 0
) -> dict[str, NDArray[np.float32]]:
    """PEFT's tensors of a random LoRA for ``shapes`` (module to (n_out, n_in); ``embed_tokens`` as an embedding)."""
    random = np.random.default_rng(seed)
    tensors: dict[str, NDArray[np.float32]] = {}
    for module, (n_out, n_in) in shapes.items():
        rank = ranks if isinstance(ranks, int) else ranks[module]
        embedding = module.endswith("embed_tokens")
        if embedding:
            n_out, n_in = n_in, n_out
        a, b = random.normal(0, std, (rank, n_in)), random.normal(0, std, (n_out, rank))
        names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
        for name, values in zip(names, (a, b), strict=True):
            tensors[f"base_model.model.{module}.{name}"] = values.astype(np.float32)
    return tensors


def peft_config(**overrides: Any) -> dict[str, Any]:
    """An adapter_config.json as PEFT writes it, with the given values in place of its own."""
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": "someone/tiny-llama",
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
        **overrides,
    }


def make_peft_folder(
    folder: Path,
    tensors: Mapping[str, NDArray[Any]],
    config: Mapping[str, Any] | None = None,
    *,
    dtype: str = "F32",
) -> Path:
    """Write a PEFT folder with the tensors as ``dtype``: F32, F16, BF16 or another of safetensors' names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config if config is not None else peft_config()))
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors, dtype))
    return folder


def safetensors_bytes(tensors: Mapping[str, NDArray[Any]], dtype: str = "F32") -> bytes:
    """The content of a safetensors file with the tensors as ``dtype``."""
    if dtype != BF16:
        numpy_type = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}[dtype]
        return bytes(save({name: np.ascontiguousarray(values, numpy_type) for name, values in tensors.items()}))
    header, at, blobs = {}, 0, []
    for name, values in tensors.items():
        blob = (np.ascontiguousarray(values, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": BF16, "shape": list(values.shape), "data_offsets": [at, at + len(blob)]}
        at += len(blob)
        blobs.append(blob)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(blobs)


def make_gguf_adapter(
    path: Path,
    tensors: Mapping[str, NDArray[np.float32]],
    *,
    architecture: str = "llama",
    alpha: float | None = 8.0,
    kind: str = "adapter",
    adapter_type: str = "lora",
    dtype: GGMLQuantizationType = GGMLQuantizationType.F32,
    invocation_tokens: Sequence[int] = (),
    description: str = "",
) -> Path:
    """Write a GGUF adapter with exactly these tensors (``NAME.lora_a``, ``NAME.lora_b``, as the file has them)."""
    writer = GGUFWriter(path, architecture)
    writer.add_type(kind)
    writer.add_string("adapter.type", adapter_type)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    if description:
        writer.add_description(description)
    if invocation_tokens:
        writer.add_key_value(
            "adapter.alora.invocation_tokens", list(invocation_tokens), GGUFValueType.ARRAY, GGUFValueType.UINT32
        )
    for name, values in tensors.items():
        writer.add_tensor(name, quantize(values, dtype), raw_dtype=dtype)
    _finish(writer)
    return path


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
