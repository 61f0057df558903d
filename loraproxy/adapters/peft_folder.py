"""A PEFT LoRA folder (adapter_config.json, adapter_model.safetensors) to pairs for a base model.

Names and row order follow llama.cpp's convert_lora_to_gguf.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from loraproxy.adapters.architectures import ModuleNames
from loraproxy.adapters.base_model import OUTPUT, TOKEN_EMBD, BaseModel
from loraproxy.adapters.checks import MAX_PAIRS, Refused, listed, op_for
from loraproxy.adapters.pairs import AdapterPlan, Part, Place, PlannedPair, graph_notes, plan_pairs
from loraproxy.adapters.peft_config import CONVERTED, PeftConfig
from loraproxy.adapters.peft_names import WHOLE, PeftModule, PeftTensors, sort_tensors
from loraproxy.adapters.stored import StoredTensor
from loraproxy.adapters.tensors import Op
from loraproxy.adapters.unsupported import LeftOut, Unsupported

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_MAX_SCALE_NOTES = 8
_Modules = Mapping[str, PeftModule]


def plan_peft(
    config: bytes, tensors: Mapping[str, StoredTensor], base: BaseModel, unsupported: Unsupported
) -> AdapterPlan:
    """What a PEFT LoRA adds to ``base``, from its configuration and the header of its weights.

    Raises Refused with the reason. A and B of linear layers are (rank, n_in) and (n_out, rank) whether or not
    ``fan_in_fan_out`` is set, which says how the base's own weight lies: it changes nothing here.
    """
    settings = PeftConfig.parse(config)
    names = ModuleNames(base)
    left = LeftOut(unsupported)
    found = sort_tensors(tensors)
    _leave_out(found, settings, left)
    notes = _saved_base_notes(found.saved_base, names, base)
    if settings.saved_modules and WHOLE not in found.strange:
        notes.append(
            f"modules_to_save names modules whose weights are not in the file: {listed(settings.saved_modules)}"
        )
    try:
        modules = _chosen(found.modules, settings, notes)
        places = _places(modules, names, settings, base, left)
        modules = {name: modules[name] for name in places}
        if not modules:
            raise Refused("the adapter has no lora_A/lora_B tensors that can be applied")
        settings.alphas.check_cost(modules)
        settings.ranks.check_cost(modules)
        alphas = {name: settings.alpha_of(name) for name in modules}
        pairs = plan_pairs(base, _parts(modules, places, alphas, settings))
    except Refused as refusal:
        raise Refused(f"{refusal}{made_for(settings.base_name)}") from None
    _check_tying(pairs, settings)
    return AdapterPlan(
        pairs=pairs,
        notes=(*_scale_notes(modules, alphas, settings), *settings.init_notes, *notes, *graph_notes(pairs)),
        left_out=left.sentences,
        invocation_tokens=settings.invocation_tokens,
        base_name=settings.base_name,
    )


def _leave_out(found: PeftTensors, settings: PeftConfig, left: LeftOut) -> None:
    """Leave out, or refuse, the tensors that are no pairs, and the features that need more than pairs."""
    for why, tensors in found.strange.items():
        left.add(why, tensors)
    for why in settings.unsupported:
        if why not in found.strange:
            left.add(why)
    if settings.needs_changed_base:
        left.add(
            settings.needs_changed_base,
            way_out=CONVERTED,
            instead="applied as it is, which is right with the changed base model alone",
        )
    if settings.activated:
        left.add(
            "activated LoRA (alora_invocation_tokens), which starts in the middle of a prompt, is not supported",
            instead="applied to the whole prompt as a plain LoRA",
        )


def _saved_base_notes(saved: Mapping[str, StoredTensor], names: ModuleNames, base: BaseModel) -> list[str]:
    """PEFT saves an adapted embedding's own weight along; one of another shape means a resized vocabulary."""
    for module, tensor in saved.items():
        places = names.places(module)
        shape = base.shape_of(places[0].target) if len(places) == 1 else None
        if shape != tensor.shape:
            raise Refused(
                f"{module}.base_layer.weight has shape {tensor.shape}, the base model's has "
                f"{shape or 'no such tensor'}: the vocabulary was resized for training; "
                "use the base model with that vocabulary"
            )
    return [f"left out, being the base model's own weights: {listed(saved)}"] if saved else []


def _chosen(modules: _Modules, settings: PeftConfig, notes: list[str]) -> _Modules:
    """The modules that PEFT would load, each whole. Raises Refused for halves."""
    if not modules:
        raise Refused(f"{WEIGHTS_FILE} holds no lora_A/lora_B tensors")
    if len(modules) > MAX_PAIRS:
        raise Refused(f"{WEIGHTS_FILE} adapts {len(modules)} modules; at most {MAX_PAIRS} are supported")
    missing = [f"{name}.lora_{half}" for name, module in modules.items() for half in "AB" if half not in module.halves]
    if missing:
        raise Refused(f"half of a pair is missing: {listed(missing)}; save the adapter again")
    skipped = [name for name in modules if not settings.layers.has(name)]
    if skipped:
        notes.append(f"not applied, being of layers that layers_to_transform does not name: {listed(skipped)}")
    return {name: module for name, module in modules.items() if settings.layers.has(name)}


def _places(
    modules: _Modules, names: ModuleNames, settings: PeftConfig, base: BaseModel, left: LeftOut
) -> dict[str, tuple[Place, ...]]:
    """Module name to its places in the base, without the modules that are left out."""
    places = {name: names.places(name) for name in modules}
    unknown = [name for name, found in places.items() if not found]
    lacks = f"modules that the {base.describe()} does not have"
    if len(unknown) == len(modules) > 0:
        raise Refused(f"{lacks}: {listed(unknown)}; use an adapter that was trained for this base model")
    if unknown:
        left.add(lacks, unknown, way_out="use an adapter that was trained for this base model")
    embeddings = [name for name, found in places.items() if any(place.target == TOKEN_EMBD for place in found)]
    if embeddings and base.architecture == "gemma3" and not settings.trained_with(0, 18):
        # before, the adapter was trained beside an embedding that its module scales, without being scaled itself
        left.add(
            "an adapter of Gemma 3's embedding from PEFT before 0.18, which did not scale it as the embedding is, "
            "is not supported",
            embeddings,
        )
        places.update(dict.fromkeys(embeddings, ()))
    return {name: found for name, found in places.items() if found}


def _parts(
    modules: _Modules, places: Mapping[str, tuple[Place, ...]], alphas: Mapping[str, float], settings: PeftConfig
) -> Iterator[tuple[str, Part]]:
    for name, module in modules.items():
        a, b = module.halves["A"], module.halves["B"]
        scale = settings.scale(alphas[name], module.rank)
        n_out = sum(rows.n_rows for place in places[name] for rows in place.rows)
        for place in places[name]:
            if module.embedding != (op_for(place.target) is Op.GET_ROWS):
                kind = "lora_embedding_A/B" if module.embedding else "lora_A/B"
                raise Refused(f"module {name} has {kind} tensors, which do not fit tensor {place.target}")
            yield place.target, Part(name, a, b, scale, place.rows, n_out, expert=place.expert)


def _check_tying(pairs: Iterable[PlannedPair], settings: PeftConfig) -> None:
    """With ensure_weight_tying PEFT trains one pair for embedding and head, and may save it once only."""
    targets = {pair.target for pair in pairs} & {TOKEN_EMBD, OUTPUT}
    if settings.weight_tying and len(targets) == 1:
        raise Refused(
            f"ensure_weight_tying is set, but only {targets.pop()} is adapted; save the adapter with both "
            "embed_tokens and lm_head"
        )


def _scale_notes(modules: _Modules, alphas: Mapping[str, float], settings: PeftConfig) -> list[str]:
    scales = {(alphas[name], module.rank) for name, module in modules.items()}
    notes = [settings.describe_scale(alpha, rank) for alpha, rank in sorted(scales)[:_MAX_SCALE_NOTES]]
    other = [name for name, module in modules.items() if settings.stated_rank_of(name) not in (None, module.rank)]
    if other:
        notes.append(f"another rank than adapter_config.json states, which is the one that counts: {listed(other)}")
    return notes


def made_for(base_name: str) -> str:
    """What a refusal adds about the base model that the adapter's configuration names."""
    return f" (its adapter_config.json names the base {base_name[:120]!r})" if base_name else ""


def what_is_missing(folder: Path) -> str:
    """Why ``folder`` is not a whole PEFT folder, by its files' names; empty where it is."""
    if not os.path.exists(folder / CONFIG_FILE):
        return f"the folder has no {CONFIG_FILE}; give a GGUF file or a PEFT folder"
    if os.path.exists(folder / WEIGHTS_FILE):
        return ""
    if os.path.exists(folder / "adapter_model.bin"):
        return (
            "the weights are pickled (adapter_model.bin), and unpickling can run code; load the adapter with PEFT "
            "and save it with save_pretrained(..., safe_serialization=True)"
        )
    return f"the folder has no {WEIGHTS_FILE}"
