"""adapter_config.json of a PEFT LoRA: what is asked for, whether it can be done, and each module's scale.

Formulas and matching rules: PEFT's LoraLayer.update_layer, get_pattern_key and check_target_module_exists. What the
initialisations do to the base: PEFT's guide on LoRA and its examples of PiSSA, OLoRA, CorDA and LoftQ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loraproxy.adapters.checks import Refused, printable
from loraproxy.adapters.names import shorten
from loraproxy.adapters.peft_names import DORA, TOKENS
from loraproxy.adapters.peft_patterns import LayerChoice, ModulePatterns
from loraproxy.adapters.unsupported import WAY_OUT

# what makes an adapter something else than pairs added to the base model's own weights: without it nothing is right
_NO_PLAIN_PAIRS = {
    "use_qalora": "QALoRA (use_qalora) pools its inputs",
    "use_bdlora": "block-diagonal LoRA (use_bdlora) is no plain pair",
    "arrow_config": "Arrow routing (arrow_config) mixes adapters per token",
    "kasa_config": "KaSA (kasa_config) changes the base weights",
    "monteclora_config": "MonteCLoRA (monteclora_config) is no plain pair",
    "layer_replication": "layer_replication changes the base model's layers",
}
_LEAVABLE = {
    "use_dora": DORA,
    "trainable_token_indices": TOKENS,
    "target_parameters": "adapting tensors that are no modules (target_parameters) is not supported",
}
# velora changes only how it is trained
_KNOWN_SWITCHES = frozenset((*_NO_PLAIN_PAIRS, *_LEAVABLE, "use_rslora", "use_velora"))
# they begin with part of the base's weights in the pair, and take it out of the base
_INITS_THAT_CHANGE_THE_BASE = ("pissa", "olora", "corda", "lora_ga")
CONVERTED = "save it again with PEFT's path_initial_model_for_weight_conversion, which makes it a plain LoRA"
"""The way out for them."""
_LOFTQ = "loftq"
_MAX_INVOCATION_TOKENS = 1024


@dataclass(frozen=True)
class PeftConfig:
    """The parts of the configuration that decide how the weights are applied."""

    alpha: float
    alphas: ModulePatterns
    rank: int | None
    ranks: ModulePatterns
    rslora: bool
    layers: LayerChoice
    weight_tying: bool
    base_name: str
    peft_version: str
    saved_modules: tuple[str, ...]
    """What modules_to_save names."""
    unsupported: tuple[str, ...]
    """A sentence for each feature that is asked for and cannot be had, but without which the rest makes sense."""
    init: str
    """How its weights were initialised, where that has a name."""
    activated: bool
    """Activated LoRA (aLoRA): it applies from its invocation tokens on."""
    invocation_tokens: tuple[int, ...]

    @classmethod
    def parse(cls, data: bytes) -> PeftConfig:
        """Read adapter_config.json. Raises Refused with the reason, for what is no plain LoRA at all too."""
        try:
            config = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Refused(f"adapter_config.json is not JSON: {shorten(str(error))}") from None
        if not isinstance(config, dict):
            raise Refused("adapter_config.json is not a JSON object")
        _check_plain(config)
        tokens = config.get("alora_invocation_tokens")
        saved = config.get("modules_to_save")
        return cls(
            alpha=_alpha(config.get("lora_alpha"), "lora_alpha"),
            alphas=ModulePatterns.parse(config.get("alpha_pattern"), "alpha_pattern", _alpha),
            rank=None if config.get("r") is None else int(_rank(config["r"], "r")),
            ranks=ModulePatterns.parse(config.get("rank_pattern"), "rank_pattern", _rank),
            rslora=_flag(config, "use_rslora"),
            layers=LayerChoice.parse(config.get("layers_to_transform"), config.get("layers_pattern")),
            weight_tying=_flag(config, "ensure_weight_tying"),
            base_name=_text(config, "base_model_name_or_path"),
            peft_version=_text(config, "peft_version"),
            saved_modules=tuple(name for name in saved if isinstance(name, str)) if isinstance(saved, list) else (),
            unsupported=tuple(why for key, why in _LEAVABLE.items() if _is_set(config, key)),
            init=_text(config, "init_lora_weights"),
            activated=_is_set(config, "alora_invocation_tokens") or bool(_text(config, "invocation_string")),
            invocation_tokens=_tokens(tokens) if _is_set(config, "alora_invocation_tokens") else (),
        )

    def alpha_of(self, module: str) -> float:
        """The alpha of a module of the base model, by the first pattern that matches its name."""
        return float(self.alphas.value_for(module, self.alpha))

    def stated_rank_of(self, module: str) -> int | None:
        """The rank that r and rank_pattern give a module; the pair's own is what its tensors have."""
        stated = self.ranks.value_for(module, self.rank)
        return None if stated is None else int(stated)

    def scale(self, alpha: float, rank: int) -> float:
        """alpha / rank, or alpha / sqrt(rank) for rank-stabilised LoRA (arXiv 2312.03732).

        ``rank`` is the pair's own, which is what rank_pattern or r asked for when it was made.
        """
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def describe_scale(self, alpha: float, rank: int) -> str:
        """For the adapter's notes: ``rsLoRA: scale = 8 / sqrt(8) = 2.83``."""
        kind, divisor = ("rsLoRA", f"sqrt({rank})") if self.rslora else ("LoRA", str(rank))
        return f"{kind}: scale = {alpha:g} / {divisor} = {self.scale(alpha, rank):.3g}"

    @property
    def needs_changed_base(self) -> str:
        """Why it is wrong on the original base model; empty where it is not."""
        if not self.init.lower().startswith(_INITS_THAT_CHANGE_THE_BASE):
            return ""
        return (
            f"init_lora_weights is {shorten(self.init)}: the adapter belongs to a changed base model, from which PEFT"
            " took what the adapter began with"
        )

    @property
    def init_notes(self) -> tuple[str, ...]:
        """What its initialisation means for the base model that it is used with."""
        if self.init.lower() != _LOFTQ:
            return ()
        return (
            "LoftQ (init_lora_weights): trained to make up for the rounding of a base model in few bits, of which"
            " another quantisation has its own; compare its answers with those it had in training",
        )

    def trained_with(self, major: int, minor: int) -> bool:
        """True if PEFT was of this version or later; it states its version since 0.18."""
        parts = self.peft_version.split(".")
        if len(parts) < 2 or not all(part.isascii() and part.isdecimal() and len(part) < 6 for part in parts[:2]):
            return False
        return (int(parts[0]), int(parts[1])) >= (major, minor)


def _check_plain(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise Refused(f"peft_type is {shorten(kind)}; only 'LORA' is supported: {WAY_OUT}")
    for key, why in _NO_PLAIN_PAIRS.items():
        if _is_set(config, key):
            raise Refused(f"{why}, which is not supported: {WAY_OUT}")
    for key, value in config.items():
        if key.startswith("use_") and value is True and key not in _KNOWN_SWITCHES:
            raise Refused(f"{shorten(key)} is set, a variant of LoRA that is not known here: {WAY_OUT}")


def _is_set(config: Mapping[str, Any], key: str) -> bool:
    return config.get(key) not in (None, False, [], {})


def _alpha(value: Any, where: str) -> float:
    alpha = _number(value, where)
    if alpha == 0 or not math.isfinite(alpha):
        raise Refused(f"adapter_config.json: {where} must be a finite number other than 0, not {shorten(value)}")
    return alpha


def _rank(value: Any, where: str) -> float:
    rank = _number(value, where)
    if not 1 <= rank < 1 << 31 or rank != int(rank):
        raise Refused(f"adapter_config.json: {where} must be a whole number of at least 1, not {shorten(value)}")
    return rank


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Refused(f"adapter_config.json: {where} must be a number, not {shorten(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value not in (None, True, False):
        raise Refused(f"adapter_config.json: {key} must be true or false, not {shorten(value)}")
    return bool(value)


def _text(config: Mapping[str, Any], key: str) -> str:
    value = config.get(key)
    return printable(value, 256) if isinstance(value, str) else ""


def _tokens(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MAX_INVOCATION_TOKENS:
        raise Refused(f"adapter_config.json: alora_invocation_tokens must be a list of tokens, not {shorten(value)}")
    if not all(type(token) is int and 0 <= token < 1 << 31 for token in value):
        raise Refused(f"adapter_config.json: alora_invocation_tokens must be numbers of tokens, not {shorten(value)}")
    return tuple(value)
