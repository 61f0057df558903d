"""adapter_config.json of a PEFT LoRA: what is asked for, whether it can be done, and each module's scale.

Formulas and matching rule: PEFT's LoraLayer.update_layer and get_pattern_key.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loraproxy.adapters.checks import Refused
from loraproxy.adapters.names import shorten

# Patterns are regular expressions of a stranger's: these limits keep matching them all within seconds.
_MAX_PATTERNS = 2048
_MAX_REPEATING_PATTERNS = 64
_MAX_PATTERN_LENGTH = 256
_MAX_REPEATS = 2
_REPEAT = re.compile(r"[*+?{]")

_UNSUPPORTED = {
    "use_dora": "DoRA (use_dora) changes the weights' magnitudes",
    "use_qalora": "QALoRA (use_qalora) pools its inputs",
    "use_bdlora": "block-diagonal LoRA (use_bdlora) is no plain pair",
    "arrow_config": "Arrow routing (arrow_config) mixes adapters per token",
    "kasa_config": "KaSA (kasa_config) changes the base weights",
    "monteclora_config": "MonteCLoRA (monteclora_config) is no plain pair",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens) starts in the middle of a prompt",
    "layer_replication": "layer_replication changes the base model's layers",
    "target_parameters": "target_parameters adapts tensors that are no modules",
    "trainable_token_indices": "trainable_token_indices replaces rows of the embedding",
    "modules_to_save": "modules_to_save replaces whole weights",
}
_INITS_THAT_CHANGE_THE_BASE = ("pissa", "olora", "corda", "lora_ga")
_WAY_OUT = "train a plain LoRA, or merge the adapter into the base model"


@dataclass(frozen=True)
class PeftConfig:
    """The parts of the configuration that decide how the weights are applied."""

    alpha: float
    alpha_pattern: tuple[tuple[re.Pattern[str], float], ...]
    """Patterns over module names, in the file's order, each with its alpha."""
    rslora: bool
    weight_tying: bool
    base_name: str

    @classmethod
    def parse(cls, data: bytes) -> PeftConfig:
        """Read adapter_config.json. Raises Refused with the reason, for everything that is no plain LoRA too."""
        try:
            config = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Refused(f"adapter_config.json is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise Refused("adapter_config.json is not a JSON object")
        _check_supported(config)
        rank_pattern = config.get("rank_pattern") or {}
        alpha_pattern = config.get("alpha_pattern") or {}
        if not isinstance(rank_pattern, dict) or not isinstance(alpha_pattern, dict):
            raise Refused("adapter_config.json: rank_pattern and alpha_pattern must be objects")
        if len(alpha_pattern) > _MAX_PATTERNS or sum(map(_repeats, alpha_pattern)) > _MAX_REPEATING_PATTERNS:
            raise Refused(
                f"adapter_config.json: alpha_pattern has more than {_MAX_PATTERNS} entries, or more than "
                f"{_MAX_REPEATING_PATTERNS} with repetitions; write the module names out"
            )
        base_name = config.get("base_model_name_or_path")
        return cls(
            alpha=_alpha(config.get("lora_alpha"), "lora_alpha"),
            alpha_pattern=tuple(
                (_compiled(key), _alpha(value, f"alpha_pattern[{shorten(key)}]"))
                for key, value in alpha_pattern.items()
            ),
            rslora=_flag(config, "use_rslora"),
            weight_tying=_flag(config, "ensure_weight_tying"),
            base_name=base_name if isinstance(base_name, str) else "",
        )

    def alpha_of(self, module: str) -> float:
        """The alpha of a module of the base model, by the first pattern that matches its name."""
        return next((alpha for pattern, alpha in self.alpha_pattern if pattern.match(module)), self.alpha)

    def scale(self, alpha: float, rank: int) -> float:
        """alpha / rank, or alpha / sqrt(rank) for rank-stabilised LoRA (arXiv 2312.03732).

        ``rank`` is the pair's own, which is what rank_pattern or r asked for when it was made.
        """
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def describe_scale(self, alpha: float, rank: int) -> str:
        """For the adapter's notes: ``rsLoRA: scale = 8 / sqrt(8) = 2.83``."""
        kind, divisor = ("rsLoRA", f"sqrt({rank})") if self.rslora else ("LoRA", str(rank))
        return f"{kind}: scale = {alpha:g} / {divisor} = {self.scale(alpha, rank):.3g}"


def _check_supported(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise Refused(f"peft_type is {shorten(kind)}; only 'LORA' is supported: {_WAY_OUT}")
    for key, why in _UNSUPPORTED.items():
        if config.get(key) not in (None, False, [], {}):
            raise Refused(f"{why}, which is not supported: {_WAY_OUT}")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(_INITS_THAT_CHANGE_THE_BASE):
        raise Refused(
            f"init_lora_weights is {shorten(init)}: the adapter belongs to a changed base model; save it again with "
            "PEFT's path_initial_model_for_weight_conversion, which makes it a plain LoRA"
        )


def _repeats(pattern: str) -> bool:
    return _REPEAT.search(pattern) is not None


def _compiled(pattern: str) -> re.Pattern[str]:
    """As PEFT matches it. Refuses expressions that are none, or that could take exponential time on a name."""
    if len(pattern) > _MAX_PATTERN_LENGTH:
        raise Refused(f"adapter_config.json: the pattern {shorten(pattern)} is longer than {_MAX_PATTERN_LENGTH}")
    if len(_REPEAT.findall(pattern)) > _MAX_REPEATS or re.search(r"\)[*+{]", pattern):
        raise Refused(
            f"adapter_config.json: the pattern {shorten(pattern)} repeats groups or has more than {_MAX_REPEATS} "
            "repetitions; write the module names out"
        )
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise Refused(f"adapter_config.json: the pattern {shorten(pattern)} is wrong: {error}") from None


def _alpha(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Refused(f"adapter_config.json: {where} must be a number, not {shorten(value)}")
    try:
        alpha = float(value)
    except OverflowError:
        alpha = math.inf
    if alpha == 0 or not math.isfinite(alpha):
        raise Refused(f"adapter_config.json: {where} must be a finite number other than 0, not {shorten(value)}")
    return alpha


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value not in (None, True, False):
        raise Refused(f"adapter_config.json: {key} must be true or false, not {shorten(value)}")
    return bool(value)
