"""Writing an adapter as a GGUF LoRA that stock llama.cpp loads with the same result."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray

from loraproxy.adapters.base_model import OUTPUT, TOKEN_EMBD, BaseModel
from loraproxy.adapters.tensors import Adapter, Op
from loraproxy.errors import InvalidAdapterFile

AdapterDtype = Literal["f32", "f16", "bf16", "q8_0"]

_TYPES: dict[AdapterDtype, GGMLQuantizationType] = {
    "f32": GGMLQuantizationType.F32,
    "f16": GGMLQuantizationType.F16,
    "bf16": GGMLQuantizationType.BF16,
    "q8_0": GGMLQuantizationType.Q8_0,
}
_Q8_BLOCK = 32
_TOKENS = GGUFValueType.UINT32


def write_gguf_adapter(adapter: Adapter, base: BaseModel, path: Path, dtype: AdapterDtype = "f16") -> None:
    """Write ``adapter`` to ``path``; the file appears whole or not at all.

    Each pair's scale is multiplied into its B, and ``adapter.lora.alpha`` is 0, which llama.cpp's get_scale takes
    as "scale 1": so any mixture of ranks and alphas comes out right. ``q8_0`` applies to rows that divide into
    its blocks of 32; the others (B, unless the rank does) are f16, as convert_lora_to_gguf.py has it.

    Raises InvalidAdapterFile where llama.cpp could not apply the result (:func:`check_in_llama_cpp`) or
    a weight does not fit ``dtype``; OSError if the file cannot be written.
    """
    check_in_llama_cpp(adapter, base)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        writer = GGUFWriter(temporary, base.architecture)
        writer.add_type("adapter")
        writer.add_name(adapter.name)
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", 0.0)
        if adapter.invocation_tokens:
            writer.add_key_value(
                "adapter.alora.invocation_tokens", list(adapter.invocation_tokens), GGUFValueType.ARRAY, _TOKENS
            )
        if adapter.base_name:
            writer.add_base_model_count(1)
            writer.add_base_model_name(0, adapter.base_name)
        for name, values in _arrays(adapter):
            kind = _TYPES[dtype]
            if kind is GGMLQuantizationType.Q8_0 and values.shape[-1] % _Q8_BLOCK:
                kind = GGMLQuantizationType.F16
            writer.add_tensor(name, _encode(adapter.name, name, values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_in_llama_cpp(adapter: Adapter, base: BaseModel) -> None:
    """Raises InvalidAdapterFile where llama.cpp's own LoRA graph cannot apply it: to a tied embedding or head."""
    tied = [tensor.target for tensor in adapter.tensors if tensor.target in (TOKEN_EMBD, OUTPUT)]
    if base.tied_output and tied:
        raise InvalidAdapterFile(
            f"adapter {adapter.name!r}: {', '.join(tied)} cannot be applied by llama.cpp, because the base model "
            "shares one tensor between embedding and output head, and it cannot adapt one of the two alone"
        )


def _arrays(adapter: Adapter) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for tensor in adapter.tensors:
        # llama.cpp picks a token's row of an embedding's A, so that A lies as (n_vocab, rank)
        a = tensor.a.T if tensor.op is Op.GET_ROWS else tensor.a
        yield f"{tensor.target}.lora_a", np.ascontiguousarray(a)
        with np.errstate(over="ignore"):
            yield f"{tensor.target}.lora_b", tensor.b * np.float32(tensor.scale)


def _encode(adapter: str, name: str, values: NDArray[np.float32], kind: GGMLQuantizationType) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        encoded: NDArray[Any] = quantize(values, kind)
    overflow = not np.isfinite(values).all() or (encoded.dtype == np.float16 and not np.isfinite(encoded).all())
    if overflow:
        raise InvalidAdapterFile(f"adapter {adapter!r}: weights of {name} are too large for {kind.name}; use f32")
    return encoded
