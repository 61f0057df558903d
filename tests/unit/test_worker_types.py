"""Any JSON in any field: an answer or a refusal with a reason, never a fault of ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientSession, UnixConnector, web
from scripted import ScriptedEngine, spoken

from loraproxy.worker.app import WorkerApp

VALUES: list[Any] = [
    *(None, True, 0, -1, 1.5, 2**31, -(2**63), 10**30, 1e308),
    *("", "x", "\0", "\ud800", "é" * 1000),
    *([], [[]], [None], [1, "a", None], {}, {"a": {"b": [1]}}),
]
COMPLETION = [
    "prompt",
    "n_predict",
    "max_tokens",
    "n_probs",
    "logprobs",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "samplers",
    "logit_bias",
    "grammar",
    "json_schema",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "repeat_last_n",
    "repeat_penalty",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "min_keep",
    "n_keep",
    "n_discard",
    "n",
    "cache_prompt",
    "t_max_predict_ms",
    "response_fields",
    "return_tokens",
    "return_progress",
    "ignore_eos",
    "lora",
    "model",
    "id_slot",
    "timings_per_token",
    "post_sampling_probs",
    "echo",
    "suffix",
    "best_of",
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "dynatemp_range",
    "dynatemp_exponent",
    "n_indent",
    "grammar_lazy",
    "adaptive_target",
    "presence_penalty",
    "frequency_penalty",
]
CHAT = [
    "messages",
    "chat_template_kwargs",
    "response_format",
    "tools",
    "tool_choice",
    "functions",
    "reasoning_effort",
    "logprobs",
    "top_logprobs",
    "add_generation_prompt",
    "continue_final_message",
    "max_completion_tokens",
    "echo",
]
USER = {"role": "user", "content": "x"}


def messages(value: Any) -> list[Any]:
    """``value`` in each place of a message."""
    return [
        value,
        {"role": value, "content": "x"},
        {"role": "user", "content": value},
        {"role": "user", "content": [value]},
        {"role": "user", "content": [{"type": value}]},
        {"role": "user", "content": [{"type": "text", "text": value}]},
        {"role": "assistant", "content": value},
        {"role": "assistant", "tool_calls": value},
    ]


REQUESTS: dict[str, list[dict[str, Any]]] = {
    "/completion": [{"prompt": "x", field: value} for field in COMPLETION for value in VALUES],
    "/v1/completions": [{"prompt": "x", field: value} for field in COMPLETION for value in VALUES],
    "/v1/chat/completions": [
        *({"messages": [USER], field: value} for field in CHAT for value in VALUES),
        *({"messages": [message]} for value in VALUES for message in messages(value)),
    ],
    "/apply-template": [{"messages": [USER, message]} for value in VALUES for message in messages(value)],
    "/tokenize": [
        {"content": "x", field: value}
        for field in ("content", "add_special", "parse_special", "with_pieces")
        for value in VALUES
    ],
    "/detokenize": [{"tokens": value} for value in VALUES],
}


@pytest_asyncio.fixture
async def client(tmp_path: Path) -> AsyncIterator[ClientSession]:
    worker = WorkerApp(())
    worker.serve(ScriptedEngine(spoken("x")))  # type: ignore[arg-type]
    runner = web.AppRunner(worker.app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "worker.sock")).start()
    async with ClientSession("http://worker", connector=UnixConnector(str(tmp_path / "worker.sock"))) as session:
        yield session
    await runner.cleanup()


@pytest.mark.parametrize("path", REQUESTS)
async def test_any_value_in_any_field_is_served_or_refused(client: ClientSession, path: str) -> None:
    for body in REQUESTS[path]:
        async with client.post(path, data=json.dumps(body)) as response:
            text = await asyncio.wait_for(response.text(), 10)
        assert response.status in (200, 400, 501), (body, text)
        if response.status != 200:
            assert len(json.loads(text)["error"]["message"]) < 300, (body, text)
