"""How a generation's parameters are shown: ``generation_settings`` in answers, ``params`` in /slots and /props.

Keys and order are those of ``task_params::to_json`` in tools/server/server-task.cpp. Floats are shown as the
float32 values that are computed with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from loraproxy.adapters.sets import f32
from loraproxy.worker.types import Generation


@dataclass(frozen=True)
class Shown:
    """What ``generation_settings`` reports beside the generation itself."""

    stream: bool = False
    timings_per_token: bool = False
    n_keep: int = 0
    n_discard: int = 0


def brief_settings(generation: Generation, shown: Shown) -> dict[str, Any]:
    """The parameters as /props and /slots show them."""
    s = generation.sampling
    return {
        "seed": s.seed,
        "temperature": f32(s.temperature),
        "dynatemp_range": f32(s.dynatemp_range),
        "dynatemp_exponent": f32(s.dynatemp_exponent),
        "top_k": s.top_k,
        "top_p": f32(s.top_p),
        "min_p": f32(s.min_p),
        "top_n_sigma": f32(s.top_n_sigma),
        "xtc_probability": f32(s.xtc_probability),
        "xtc_threshold": f32(s.xtc_threshold),
        "typical_p": f32(s.typical_p),
        "repeat_last_n": s.repeat_last_n,
        "repeat_penalty": f32(s.repeat_penalty),
        "presence_penalty": f32(s.presence_penalty),
        "frequency_penalty": f32(s.frequency_penalty),
        "dry_multiplier": f32(s.dry_multiplier),
        "dry_base": f32(s.dry_base),
        "dry_allowed_length": s.dry_allowed_length,
        "dry_penalty_last_n": s.dry_penalty_last_n,
        "mirostat": s.mirostat,
        "mirostat_tau": f32(s.mirostat_tau),
        "mirostat_eta": f32(s.mirostat_eta),
        "adaptive_target": -1.0,
        "adaptive_decay": f32(0.9),
        "max_tokens": generation.n_predict,
        "n_predict": generation.n_predict,
        "n_keep": shown.n_keep,
        "n_discard": shown.n_discard,
        "ignore_eos": s.ignore_eos,
        "stream": shown.stream,
        "n_probs": generation.n_probs,
        "min_keep": s.min_keep,
        "chat_format": "Content-only",
        "reasoning_format": "none",
        "reasoning_in_content": False,
        "generation_prompt": "",
        "samplers": list(s.samplers),
        "speculative.types": "none",
        "timings_per_token": shown.timings_per_token,
        "post_sampling_probs": generation.post_sampling_probs,
        "backend_sampling": False,
        "lora": generation.adapters.wire(),
    }


def full_settings(generation: Generation, shown: Shown) -> dict[str, Any]:
    """The parameters as ``generation_settings`` shows them: with strings, biases and the grammar."""
    s = generation.sampling
    return brief_settings(generation, shown) | {
        "dry_sequence_breakers": list(s.dry_sequence_breakers),
        "stop": list(generation.stop),
        "logit_bias": [
            {"bias": None if math.isinf(bias) else f32(bias), "token": token} for token, bias in s.logit_bias
        ],
        "grammar": s.grammar,
        "grammar_lazy": False,
        "grammar_triggers": [],
        "preserved_tokens": [],
    }
