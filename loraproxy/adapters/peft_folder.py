"""A PEFT LoRA folder (adapter_config.json, adapter_model.safetensors) to pairs for a base model.

Names and row order follow llama.cpp's convert_lora_to_gguf.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from loraproxy.adapters.architectures import ModuleNames, permute_rows
from loraproxy.adapters.base_model import OUTPUT, TOKEN_EMBD, BaseModel
from loraproxy.adapters.checks import MAX_PAIRS, Refused, checked_pair, in_graph_order, listed, op_for
from loraproxy.adapters.peft_config import PeftConfig
from loraproxy.adapters.tensors import LoraTensor, Op

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_PREFIX = "base_model.model."
# PEFT drops the adapter's name (the part after lora_A) when it saves; some trainers' own checkpoints keep it
_LINEAR = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(\.[^.]+)?\.weight")
_EMBEDDING = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<half>[AB])(\.[^.]+)?")
_BASE_LAYER = ".base_layer.weight"
_MAX_SCALE_NOTES = 8
_WAY_OUT = "train a plain LoRA, or merge the adapter into the base model"

_Arrays = dict[str, NDArray[Any]]


@dataclass
class _Module:
    """One adapted module: ``halves`` holds A and B as PEFT stores them."""

    embedding: bool
    halves: _Arrays = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The inner dimension; at least 1, so that a scale can be worked out before an empty pair is refused."""
        return max(int(self.halves["A"].shape[0]), 1)


def pairs_from_peft(config: bytes, weights: bytes, base: BaseModel) -> tuple[tuple[LoraTensor, ...], tuple[str, ...]]:
    """Read a PEFT LoRA from the contents of its two files: (pairs, notes). Raises Refused with the reason.

    A and B of linear layers are (rank, n_in) and (n_out, rank) whether or not ``fan_in_fan_out`` is set, which
    says how the base's own weight lies. ``fan_in_fan_out`` therefore changes nothing here.
    """
    settings = PeftConfig.parse(config)
    names = ModuleNames(base)
    arrays = _load(weights)
    modules, saved_base = _sort(arrays)
    _check_whole(modules)
    notes: list[str] = []
    if saved_base:
        _check_saved_base(saved_base, names, base)
        notes.append(f"left out, being the base model's own weights: {listed(saved_base)}")
    try:
        targets = _targets(modules, names, base)
        alphas = {name: settings.alpha_of(name) for name in modules}
        scales = {name: settings.scale(alphas[name], module.rank) for name, module in modules.items()}
        pairs = in_graph_order(_pairs(modules, targets, scales, base))
    except Refused as refusal:
        raise Refused(f"{refusal}{_made_for(settings)}") from None
    _check_tying(pairs, settings)
    described = {settings.describe_scale(alphas[name], module.rank) for name, module in modules.items()}
    return pairs, (*sorted(described)[:_MAX_SCALE_NOTES], *notes)


def _load(weights: bytes) -> _Arrays:
    """Tensor name to array. F32 and F16 are views, BF16 is widened to float32."""
    if len(weights) >= 8 and (stated := int.from_bytes(weights[:8], "little")) > len(weights) - 8:
        raise Refused(
            f"{WEIGHTS_FILE} announces a header of {stated} bytes but has only {len(weights)}: "
            "it is truncated or damaged"
        )
    try:
        entries: list[tuple[str, dict[str, Any]]] = safetensors.deserialize(weights)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise Refused(f"{WEIGHTS_FILE} is damaged: {error}") from None
    unreadable = [f"{name} ({entry['dtype']})" for name, entry in entries if entry["dtype"] not in _DECODERS]
    if unreadable:
        raise Refused(f"tensors of a type that cannot be read: {listed(unreadable)}; save them as F32, F16 or BF16")
    # sorted: the package returns them in no fixed order, and which fault is reported first should not change
    entries.sort(key=lambda named: named[0])
    return {name: _DECODERS[entry["dtype"]](entry["data"]).reshape(entry["shape"]) for name, entry in entries}


def _bf16(data: bytes) -> NDArray[np.float32]:
    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")


_DECODERS = {
    "F32": lambda data: np.frombuffer(data, "<f4"),
    "F16": lambda data: np.frombuffer(data, "<f2"),
    "BF16": _bf16,
}


def _sort(arrays: _Arrays) -> tuple[dict[str, _Module], _Arrays]:
    """Module name (without PEFT's prefix) to its halves; and weights of the base that PEFT saved along."""
    modules: dict[str, _Module] = {}
    saved_base: _Arrays = {}
    other = []
    for name, array in arrays.items():
        bare = name.removeprefix(_PREFIX)
        match = _LINEAR.fullmatch(bare)
        embedding = match is None
        match = match or _EMBEDDING.fullmatch(bare)
        if bare.endswith(_BASE_LAYER):
            saved_base[bare.removesuffix(_BASE_LAYER)] = array
        elif match is None:
            other.append(name)
        else:
            module = modules.setdefault(match["module"], _Module(embedding))
            if module.embedding != embedding:
                raise Refused(f"module {match['module'][:120]} has both lora_A/B and lora_embedding_A/B tensors")
            if match["half"] in module.halves:
                raise Refused(f"module {match['module'][:120]} has more than one lora_{match['half']}")
            module.halves[match["half"]] = array
    if other:
        raise Refused(_why_unexpected(other))
    if not modules:
        raise Refused(f"{WEIGHTS_FILE} holds no lora_A/lora_B tensors")
    if len(modules) > MAX_PAIRS:
        raise Refused(f"{WEIGHTS_FILE} adapts {len(modules)} modules; at most {MAX_PAIRS} are supported")
    return modules, saved_base


def _why_unexpected(names: list[str]) -> str:
    shown = listed(names)
    if any("lora_magnitude_vector" in name for name in names):
        return f"DoRA tensors ({shown}) are not supported: {_WAY_OUT}"
    if any(name.endswith(".bias") for name in names):
        return f"trained bias tensors ({shown}) are not supported: {_WAY_OUT} (bias='none')"
    if any(name.endswith(".weight") and "lora_" not in name for name in names):
        return f"whole weights ({shown}; modules_to_save, or a resized vocabulary) are not supported: {_WAY_OUT}"
    return f"tensors that belong to no plain LoRA: {shown}: {_WAY_OUT}"


def _check_whole(modules: Mapping[str, _Module]) -> None:
    missing = [f"{name}.lora_{half}" for name, module in modules.items() for half in "AB" if half not in module.halves]
    if missing:
        raise Refused(f"half of a pair is missing: {listed(missing)}; save the adapter again")
    flat = [
        f"{name} {array.shape}"
        for name, module in modules.items()
        for array in module.halves.values()
        if array.ndim != 2
    ]
    if flat:
        raise Refused(f"tensors that are no matrices: {listed(flat)}; only linear layers and embeddings are supported")


def _check_saved_base(saved: _Arrays, names: ModuleNames, base: BaseModel) -> None:
    """PEFT saves an adapted embedding's own weight along; one of another shape means a resized vocabulary."""
    for module, array in saved.items():
        target = names.target(module)
        if target is None or base.shape_of(target) != array.shape:
            raise Refused(
                f"{module}{_BASE_LAYER} has shape {array.shape}, the base model's has "
                f"{base.shape_of(target) if target else 'no such tensor'}: the vocabulary was resized for training; "
                "use the base model with that vocabulary"
            )


def _targets(modules: Mapping[str, _Module], names: ModuleNames, base: BaseModel) -> dict[str, str]:
    """Module name to the name of its GGUF tensor, which the base has and no other module shares."""
    targets: dict[str, str] = {}
    unknown = []
    for name in modules:
        target = names.target(name)
        if target is None or base.shape_of(target) is None:
            unknown.append(name)
        else:
            targets[name] = target
    if unknown:
        raise Refused(f"modules that the {base.describe()} does not have: {listed(unknown)}")
    owner: dict[str, str] = {}
    for name, target in targets.items():
        if owner.setdefault(target, name) != name:
            raise Refused(f"modules {owner[target]} and {name} are both tensor {target}")
    return targets


def _pairs(
    modules: Mapping[str, _Module], targets: Mapping[str, str], scales: Mapping[str, float], base: BaseModel
) -> Iterator[LoraTensor]:
    for name, module in modules.items():
        target = targets[name]
        op = op_for(target)
        if module.embedding != (op is Op.GET_ROWS):
            kind = "lora_embedding_A/B" if module.embedding else "lora_A/B"
            raise Refused(f"module {name} has {kind} tensors, which do not fit tensor {target}")
        pair = checked_pair(base, target, op, module.halves["A"], module.halves["B"], scales[name])
        yield replace(pair, b=np.ascontiguousarray(permute_rows(base, target, pair.b)))


def _check_tying(pairs: tuple[LoraTensor, ...], settings: PeftConfig) -> None:
    """With ensure_weight_tying PEFT trains one pair for embedding and head, and may save it once only."""
    targets = {pair.target for pair in pairs} & {TOKEN_EMBD, OUTPUT}
    if settings.weight_tying and len(targets) == 1:
        raise Refused(
            f"ensure_weight_tying is set, but only {targets.pop()} is adapted; save the adapter with both "
            "embed_tokens and lm_head"
        )


def _made_for(settings: PeftConfig) -> str:
    return f" (its adapter_config.json names the base {settings.base_name[:120]!r})" if settings.base_name else ""
