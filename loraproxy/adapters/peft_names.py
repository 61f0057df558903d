"""What the names in a PEFT file's weights say that each tensor is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from loraproxy.adapters.checks import Refused
from loraproxy.adapters.stored import StoredTensor

_PREFIX = "base_model.model."
# PEFT drops the adapter's name (the part after lora_A) when it saves; some trainers' own checkpoints keep it
_LINEAR = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(\.[^.]+)?\.weight")
_EMBEDDING = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<half>[AB])(\.[^.]+)?")
_BASE_LAYER = ".base_layer.weight"

DORA = "DoRA (use_dora), which changes the weights' magnitudes, is not supported"
TOKENS = "replacing rows of the embedding (trainable_token_indices) is not supported"
_BIAS = "a trained bias (bias, lora_bias) is not supported"
WHOLE = "replacing whole weights (modules_to_save, or a resized vocabulary) is not supported"
_OTHER = "tensors that belong to no plain LoRA"


@dataclass
class PeftModule:
    """One adapted module: ``halves`` holds A and B as PEFT stores them."""

    embedding: bool
    halves: dict[str, StoredTensor] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The inner dimension; at least 1, so that a scale can be worked out before an empty pair is refused."""
        return max(self.halves["A"].shape[0], 1) if self.halves["A"].shape else 1


@dataclass
class PeftTensors:
    """The tensors of a file. Names of modules and of saved weights lack PEFT's prefix."""

    modules: dict[str, PeftModule] = field(default_factory=dict)
    saved_base: dict[str, StoredTensor] = field(default_factory=dict)
    """Weights of the base that PEFT saved along."""
    strange: dict[str, list[str]] = field(default_factory=dict)
    """What they would need, to the full names of the tensors."""


def sort_tensors(tensors: Mapping[str, StoredTensor]) -> PeftTensors:
    """Tell pairs from everything else. Raises Refused for contradictions."""
    found = PeftTensors()
    for name, tensor in tensors.items():
        bare = name.removeprefix(_PREFIX)
        match = _LINEAR.fullmatch(bare)
        embedding = match is None
        match = match or _EMBEDDING.fullmatch(bare)
        if bare.endswith(_BASE_LAYER) and "token_adapter" not in bare:
            found.saved_base[bare.removesuffix(_BASE_LAYER)] = tensor
        elif match is None:
            found.strange.setdefault(_what_it_needs(name), []).append(name)
        else:
            _add_half(found.modules, match["module"], match["half"], embedding, tensor)
    return found


def _add_half(modules: dict[str, PeftModule], name: str, half: str, embedding: bool, tensor: StoredTensor) -> None:
    module = modules.get(name)
    if module is None:
        module = modules[name] = PeftModule(embedding)
    if module.embedding != embedding:
        raise Refused(f"module {name} has both lora_A/B and lora_embedding_A/B tensors")
    if half in module.halves:
        raise Refused(f"module {name} has more than one lora_{half}")
    module.halves[half] = tensor


def _what_it_needs(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return DORA
    if "token_adapter" in name or "trainable_tokens" in name:
        return TOKENS
    if name.endswith(".bias"):
        return _BIAS
    if name.endswith(".weight") and "lora_" not in name:
        return WHOLE
    return _OTHER
