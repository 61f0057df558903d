"""A GGUF LoRA file, as llama.cpp's convert_lora_to_gguf.py writes it, to pairs for a base model.

Semantics: llama_adapter_lora_init_impl and get_scale (src/llama-adapter.cpp, src/llama-adapter.h), and
build_inp_embd (src/llama-graph.cpp) for token embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize
from numpy.typing import NDArray

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.checks import MAX_FILE_BYTES, MAX_PAIRS, Refused, checked_pair, in_graph_order, listed, op_for
from loraproxy.adapters.gguf_header import GgufArray, GgufHeader, GgufTensor, read_gguf_header
from loraproxy.adapters.tensors import LoraTensor, Op

_ALPHA = "adapter.lora.alpha"
_ALORA = "adapter.alora.invocation_tokens"
_PLAIN = {GGMLQuantizationType.F32: "<f4", GGMLQuantizationType.F16: "<f2"}


def pairs_from_gguf(data: bytes, base: BaseModel) -> tuple[tuple[LoraTensor, ...], tuple[str, ...]]:
    """Read the GGUF adapter whose whole content is ``data``: (pairs, notes).

    Raises Refused, or GgufError for a damaged file, with the reason.
    """
    header = read_gguf_header(data)
    alpha = _check_metadata(header, base)
    halves, norms = _halves(header)
    incomplete = [f"{name}.lora_{'ab'[a is not None]}" for name, (a, b) in halves.items() if a is None or b is None]
    if incomplete:
        raise Refused(f"half of a pair is missing: {listed(incomplete)}; convert the adapter again")
    if not halves:
        raise Refused("the file holds no lora_a/lora_b tensors")
    if sum(_n_values(a) + _n_values(b) for a, b in halves.values()) * 4 > MAX_FILE_BYTES:
        raise Refused(f"the weights take more than {MAX_FILE_BYTES >> 30} GiB as float32")
    notes = (f"ignored as llama.cpp ignores them: {listed(norms)}",) if norms else ()
    return in_graph_order(_pairs(data, halves, alpha, base)), notes


def _check_metadata(header: GgufHeader, base: BaseModel) -> float:
    """Check what kind of file this is; return adapter.lora.alpha, 0 if it is absent."""
    kind, adapter_type = header.text("general.type"), header.text("adapter.type")
    if kind != "adapter":
        what = "a model, not an adapter" if kind in ("", "model") else "not an adapter"
        raise Refused(f"the file is {what} (general.type is {kind!r}, it must be 'adapter')")
    if adapter_type != "lora":
        raise Refused(f"adapter.type is {adapter_type!r}; only 'lora' is supported")
    architecture = header.text("general.architecture")
    if architecture != base.architecture:
        raise Refused(
            f"the adapter is for the architecture {architecture!r}, the base model is a {base.describe()}; "
            "use an adapter trained for this base model"
        )
    invocation = header.metadata.get(_ALORA)
    if invocation is not None and not (isinstance(invocation, GgufArray) and invocation.count == 0):
        raise Refused(f"activated LoRA ({_ALORA}) is not supported; use a plain LoRA")
    alpha = header.metadata.get(_ALPHA, 0.0)
    if not isinstance(alpha, float) or header.types.get(_ALPHA) not in (None, GGUFValueType.FLOAT32):
        raise Refused(f"{_ALPHA} must be a float32 number")
    if not math.isfinite(alpha):
        raise Refused(f"{_ALPHA} is {alpha}, it must be a finite number")
    return alpha


_Halves = dict[str, tuple[GgufTensor | None, GgufTensor | None]]


def _halves(header: GgufHeader) -> tuple[_Halves, list[str]]:
    """Target name to its (A, B), either of which may be missing; and the names of norm vectors."""
    halves: _Halves = {}
    norms, unexpected = [], []
    for name, tensor in header.tensors.items():
        target, _, suffix = name.rpartition(".")
        a, b = halves.get(target, (None, None))
        if suffix == "lora_a":
            halves[target] = (tensor, b)
        elif suffix == "lora_b":
            halves[target] = (a, tensor)
        elif name.endswith("_norm.weight"):
            norms.append(name)
        else:
            unexpected.append(name)
    if unexpected:
        raise Refused(f"tensors that are neither lora_a nor lora_b: {listed(unexpected)}; only plain LoRA is supported")
    if len(halves) > MAX_PAIRS:
        raise Refused(f"the file holds {len(halves)} pairs; at most {MAX_PAIRS} are supported")
    return halves, norms


def _pairs(data: bytes, halves: _Halves, alpha: float, base: BaseModel) -> Iterator[LoraTensor]:
    for target, (a_info, b_info) in halves.items():
        assert a_info is not None
        assert b_info is not None
        op = op_for(target)
        shapes = (a_info.shape, b_info.shape)
        if base.shape_of(target) is not None and any(len(shape) != 2 for shape in shapes):
            raise Refused(f"tensor {target}: A {shapes[0]} and B {shapes[1]} must be matrices")
        a, b = _decode(data, a_info), _decode(data, b_info)
        if op is Op.GET_ROWS:
            # A is stored as (n_vocab, rank), so that GET_ROWS can pick a token's row of it
            a = a.T
        rank = b.shape[-1]
        yield checked_pair(base, target, op, a, b, alpha / rank if alpha != 0 else 1.0)


def _decode(data: bytes, info: GgufTensor) -> NDArray[Any]:
    """The tensor's values as float32, in its shape."""
    if info.type in _PLAIN:
        plain = np.frombuffer(data, _PLAIN[info.type], _n_values(info), info.offset)
        return plain.reshape(info.shape).astype(np.float32)
    raw = np.frombuffer(data, np.uint8, info.n_bytes, info.offset)
    rows = _n_values(info) // info.shape[-1]
    try:
        with np.errstate(all="ignore"):  # damaged blocks may decode to infinities, which are refused later
            values: NDArray[Any] = dequantize(raw.reshape(rows, -1), info.type)
    except NotImplementedError:
        raise Refused(
            f"tensor {info.name} has the type {info.type.name}, which cannot be read; "
            "convert the adapter with --outtype f16"
        ) from None
    return values.reshape(info.shape)


def _n_values(info: GgufTensor | None) -> int:
    return 0 if info is None else math.prod(info.shape)
