"""What the worker tells about itself: models, properties, slots, metrics and adapters, in llama-server's formats.

Sources: ``get_res_models`` and ``get_res_props`` in tools/server/server-context.cpp, the slots' ``to_json`` there,
``to_metrics`` in tools/server/server-task.cpp.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from loraproxy import __version__
from loraproxy.config import WorkerAdapter
from loraproxy.worker.settings_view import Shown, brief_settings
from loraproxy.worker.templates import ChatTemplate
from loraproxy.worker.types import EngineCounters, Generation, SlotView

BUILD_INFO = f"loraproxy-{__version__}"


class ModelFacts(Protocol):
    """What is shown of the base model; sizes in bytes, counts in tokens or parameters."""

    alias: str
    path: Path
    ftype: str
    vocab_type: int
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    size: int
    bos_text: str
    eos_text: str


def models_json(model: ModelFacts, n_ctx_slot: int) -> dict[str, Any]:
    """``GET /v1/models``: the one base model, in Ollama's list and in OpenAI's."""
    ollama = {
        "name": model.alias,
        "model": model.alias,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": ["completion"],
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": "",
            "families": [""],
            "parameter_size": "",
            "quantization_level": "",
        },
    }
    openai = {
        "id": model.alias,
        "aliases": [model.alias],
        "tags": [],
        "object": "model",
        "created": int(time.time()),
        "owned_by": "llamacpp",
        "meta": {
            "vocab_type": model.vocab_type,
            "n_vocab": model.n_vocab,
            "n_ctx": n_ctx_slot,
            "n_ctx_train": model.n_ctx_train,
            "n_embd": model.n_embd,
            "n_params": model.n_params,
            "size": model.size,
            "ftype": model.ftype,
        },
    }
    return {"models": [ollama], "object": "list", "data": [openai]}


def props_json(model: ModelFacts, template: ChatTemplate, n_ctx_slot: int, n_slots: int) -> dict[str, Any]:
    """``GET /props``."""
    defaults = brief_settings(Generation(prompt=()), Shown())
    return {
        "default_generation_settings": {"params": defaults, "n_ctx": n_ctx_slot},
        "total_slots": n_slots,
        "model_alias": model.alias,
        "model_ftype": model.ftype,
        "model_path": str(model.path),
        "modalities": {"vision": False, "video": False, "audio": False},
        "media_marker": "",
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "ui": False,
        "ui_settings": {},
        "chat_template": template.source,
        "chat_template_caps": template.capabilities,
        "bos_token": model.bos_text,
        "eos_token": model.eos_text,
        "build_info": BUILD_INFO,
        "is_sleeping": False,
        "cors_proxy_enabled": False,
    }


def slot_json(slot: SlotView) -> dict[str, Any]:
    """One item of ``GET /slots``."""
    shown: dict[str, Any] = {
        "id": slot.id,
        "n_ctx": slot.n_ctx,
        "speculative": False,
        "is_processing": slot.generation is not None,
    }
    if slot.generation is not None:
        shown |= {
            "id_task": slot.id_task,
            "n_prompt_tokens": slot.n_prompt_tokens,
            "n_prompt_tokens_processed": slot.n_prompt_tokens_processed,
            "n_prompt_tokens_cache": slot.n_prompt_tokens_cache,
            "params": brief_settings(slot.generation, Shown()),
            "next_token": [
                {
                    "has_next_token": True,
                    "has_new_line": slot.has_new_line,
                    "n_remain": slot.n_remain,
                    "n_decoded": slot.n_decoded,
                }
            ],
        }
    return shown


def adapters_json(adapters: Sequence[WorkerAdapter]) -> list[dict[str, Any]]:
    """``GET /lora-adapters``. The scales are 0: a request without ``lora`` runs the base model."""
    return [
        {"id": adapter.id, "path": str(adapter.path), "scale": 0.0, "task_name": "", "prompt_prefix": ""}
        for adapter in adapters
    ]


class Metrics:
    """``GET /metrics`` in Prometheus' text format; the speeds are averages since the last scrape."""

    def __init__(self) -> None:
        self._last = EngineCounters()

    def scrape(self, now: EngineCounters) -> str:
        """The text for the counters ``now``, which become the start of the next window."""
        last, self._last = self._last, now
        prompt_tps = _rate(now.prompt_tokens - last.prompt_tokens, now.prompt_seconds - last.prompt_seconds)
        predicted_tps = _rate(
            now.predicted_tokens - last.predicted_tokens, now.predicted_seconds - last.predicted_seconds
        )
        counters: list[tuple[str, str, float]] = [
            ("prompt_tokens_total", "Number of prompt tokens processed, excluding cached tokens", now.prompt_tokens),
            ("prompt_tokens_cached_total", "Number of prompt tokens reused from the cache", now.prompt_tokens_cached),
            ("prompt_seconds_total", "Total time spent processing prompts", now.prompt_seconds),
            ("tokens_predicted_total", "Number of generation tokens processed", now.predicted_tokens),
            ("tokens_predicted_seconds_total", "Total time spent generating tokens", now.predicted_seconds),
            ("n_decode_total", "Total number of llama_decode() calls", now.decodes),
            ("n_tokens_max", "Largest observed sequence length (prompt + generation)", now.n_tokens_max),
        ]
        gauges: list[tuple[str, str, float]] = [
            ("prompt_tokens_seconds", "Average prompt throughput in tokens/s", prompt_tps),
            ("predicted_tokens_seconds", "Average generation throughput in tokens/s", predicted_tps),
            ("requests_processing", "Number of requests processing", now.processing),
            ("requests_deferred", "Number of requests deferred", now.deferred),
            (
                "n_busy_slots_per_decode",
                "Average number of busy slots per llama_decode() call",
                now.busy_slots / max(now.decodes, 1),
            ),
        ]
        return "".join(
            f"# HELP llamacpp:{name} {text}\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value:.10g}\n"
            for kind, items in (("counter", counters), ("gauge", gauges))
            for name, text, value in items
        )


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
