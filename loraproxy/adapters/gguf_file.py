"""A GGUF LoRA file, as llama.cpp's convert_lora_to_gguf.py writes it, to pairs for a base model.

Semantics: llama_adapter_lora_init_impl and get_scale (src/llama-adapter.cpp, src/llama-adapter.h), and
build_inp_embd (src/llama-graph.cpp) for token embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gguf.constants import GGUFValueType

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.checks import MAX_NAME, MAX_PAIRS, Refused, listed, op_for, printable, weight_of
from loraproxy.adapters.files import CheckedFile
from loraproxy.adapters.gguf_header import GgufArray, GgufHeader, HeaderGoesOn, read_gguf_header
from loraproxy.adapters.names import shorten
from loraproxy.adapters.pairs import AdapterPlan, Part, Rows, graph_notes, plan_pairs
from loraproxy.adapters.stored import StoredTensor
from loraproxy.adapters.tensors import Op
from loraproxy.adapters.unsupported import LeftOut, Unsupported

_ALPHA = "adapter.lora.alpha"
_ALORA = "adapter.alora.invocation_tokens"
_BASE_NAME = "general.base_model.0.name"
_FIRST_LOOK = 128 * 1024
_MAX_HEADER = 8 << 20
_MAX_TRAILING = 1 << 20

_Pairs = dict[str, tuple[StoredTensor, StoredTensor]]


def plan_gguf(file: CheckedFile, base: BaseModel, unsupported: Unsupported) -> AdapterPlan:
    """What a GGUF adapter adds to ``base``, from its header. Raises Refused or GgufError with the reason."""
    header = _header(file)
    alpha = _check_metadata(header, base)
    left = LeftOut(unsupported)
    tokens = _invocation_tokens(header, left)
    pairs, norms = _pairs(header, left)
    if not pairs:
        raise Refused("the file holds no lora_a/lora_b tensors")
    known = _known(pairs, base, left)
    name = header.metadata.get(_BASE_NAME)
    pairs_of_base = plan_pairs(base, _parts(known, alpha, base))
    notes = [f"ignored as llama.cpp ignores them: {listed(norms)}"] if norms else []
    return AdapterPlan(
        pairs=pairs_of_base,
        notes=(*notes, *graph_notes(pairs_of_base)),
        left_out=left.sentences,
        invocation_tokens=tokens,
        base_name=printable(name, 256) if isinstance(name, str) else "",
    )


def _header(file: CheckedFile) -> GgufHeader:
    """Read as much of the file as its header takes."""
    n_bytes = _FIRST_LOOK
    while True:
        try:
            header = read_gguf_header(file.head(n_bytes), file.size)
            break
        except HeaderGoesOn:
            if n_bytes >= _MAX_HEADER:
                raise Refused(f"its header is longer than {_MAX_HEADER} bytes, which no adapter needs") from None
            n_bytes *= 4
    end = max((tensor.offset + tensor.n_bytes for tensor in header.tensors.values()), default=file.size)
    if file.size - end > _MAX_TRAILING:
        raise Refused(f"{file.size - end} bytes follow the last tensor: the file is damaged")
    return header


def _check_metadata(header: GgufHeader, base: BaseModel) -> float:
    """Check what kind of file this is; return adapter.lora.alpha, 0 if it is absent."""
    kind, adapter_type = header.text("general.type"), header.text("adapter.type")
    if kind != "adapter":
        what = "a model, not an adapter" if kind in ("", "model") else "not an adapter"
        raise Refused(f"the file is {what} (general.type is {shorten(kind)}, it must be 'adapter')")
    if adapter_type != "lora":
        raise Refused(f"adapter.type is {shorten(adapter_type)}; only 'lora' is supported")
    architecture = header.text("general.architecture")
    if architecture != base.architecture:
        raise Refused(
            f"the adapter is for the architecture {shorten(architecture)}, the base model is a {base.describe()}; "
            "use an adapter trained for this base model"
        )
    alpha = header.metadata.get(_ALPHA, 0.0)
    if not isinstance(alpha, float) or header.types.get(_ALPHA) not in (None, GGUFValueType.FLOAT32):
        raise Refused(f"{_ALPHA} must be a float32 number")
    if not math.isfinite(alpha):
        raise Refused(f"{_ALPHA} is {alpha}, it must be a finite number")
    return alpha


def _invocation_tokens(header: GgufHeader, left: LeftOut) -> tuple[int, ...]:
    value = header.metadata.get(_ALORA)
    if value is None or (isinstance(value, GgufArray) and value.count == 0):
        return ()
    if not isinstance(value, GgufArray) or value.type is not GGUFValueType.UINT32 or len(value.values) != value.count:
        raise Refused(f"{_ALORA} must be a list of tokens, as uint32 numbers")
    left.add(
        f"activated LoRA ({_ALORA}), which starts in the middle of a prompt, is not supported",
        instead="applied to the whole prompt as a plain LoRA",
    )
    return tuple(int(token) for token in value.values)


def _pairs(header: GgufHeader, left: LeftOut) -> tuple[_Pairs, list[str]]:
    """Target name to its A and B; and the names of norm vectors."""
    halves: dict[str, dict[str, StoredTensor]] = {}
    norms, unexpected = [], []
    for name, tensor in header.tensors.items():
        target, _, suffix = name.rpartition(".")
        if len(name) > MAX_NAME:
            raise Refused(f"the name {shorten(name)} is longer than {MAX_NAME}")
        if suffix in ("lora_a", "lora_b"):
            halves.setdefault(target, {})[suffix] = tensor
        elif name.endswith("_norm.weight"):
            norms.append(name)
        else:
            unexpected.append(name)
    if unexpected:
        left.add("tensors that are neither lora_a nor lora_b, and so no plain LoRA", unexpected)
    if len(halves) > MAX_PAIRS:
        raise Refused(f"the file holds {len(halves)} pairs; at most {MAX_PAIRS} are supported")
    missing = [f"{name}.{half}" for name, has in halves.items() for half in ("lora_a", "lora_b") if half not in has]
    if missing:
        raise Refused(f"half of a pair is missing: {listed(missing)}; convert the adapter again")
    return {target: (both["lora_a"], both["lora_b"]) for target, both in halves.items()}, norms


def _known(pairs: _Pairs, base: BaseModel, left: LeftOut) -> _Pairs:
    """The pairs of tensors that the base has. Raises Refused if there are none."""
    unknown = [target for target in pairs if base.shape_of(target) is None]
    lacks = f"tensors that the {base.describe()} does not have"
    if len(unknown) == len(pairs):
        raise Refused(f"{lacks}: {listed(unknown)}; use an adapter that was trained for this base model")
    if unknown:
        left.add(lacks, unknown, way_out="use an adapter that was trained for this base model")
    return {target: halves for target, halves in pairs.items() if base.shape_of(target) is not None}


def _parts(pairs: _Pairs, alpha: float, base: BaseModel) -> Iterator[tuple[str, Part]]:
    for target, (a, b) in pairs.items():
        n_out, n_in, _ = weight_of(base, target)
        # an embedding's A is stored as (n_vocab, rank), so that GET_ROWS can pick a token's row of it
        embedding = op_for(target) is Op.GET_ROWS
        n_rows = n_in if embedding else n_out
        scale = alpha / max(b.shape[-1], 1) if alpha != 0 else 1.0
        yield target, Part(target, a, b, scale, (Rows(0, 0, n_rows),), n_rows, a_by_token=embedding)
