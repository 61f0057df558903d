"""Ollama's API for clients of Ollama, over any worker: llama-server's answers in Ollama's shapes.

A stream of server-sent events becomes lines of JSON. Errors are ``{"error": "text"}``. Durations are nanoseconds; what
no worker reports (the tokens of ``context``) is left out, as Ollama leaves out what is empty.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from loraproxy.errors import ApiError

VERSION = "0.12.6"
"""What ``/api/version`` says: the release whose API this follows, since clients refuse servers they think too old."""
NDJSON = "application/x-ndjson"
_FOREVER = "2318-01-01T00:00:00Z"


def error_body(error: ApiError) -> dict[str, str]:
    """An error as Ollama shows it."""
    return {"error": error.message}


@dataclass
class OllamaAnswer:
    """One answer of ``/api/generate`` (``text_field`` ``response``) or ``/api/chat`` (``message``).

    For a stream: give ``feed`` the worker's bytes as they come, then call ``close``. Else: ``whole``.
    """

    model: str
    """As the client named it."""
    text_field: str
    ended: bool = False
    """True once the last line was given out."""
    _began: int = field(default_factory=time.perf_counter_ns)
    _pending: bytes = b""
    _reason: str = ""
    _figures: dict[str, Any] = field(default_factory=dict)
    _calls: dict[int, dict[str, str]] = field(default_factory=dict)
    """Tool calls so far: index to name and arguments, which come in pieces."""

    def feed(self, data: bytes) -> bytes:
        """The lines for the next bytes of a worker's stream of server-sent events, cut anywhere."""
        *blocks, self._pending = (self._pending + data).split(b"\n\n")
        return b"".join(self._lines(block) for block in blocks)

    def close(self, error: ApiError) -> bytes:
        """What is left at the end of the worker's stream: nothing, or ``error`` if it ended too early."""
        if self.ended:
            return b""
        self.ended = True
        return _line(error_body(error))

    def whole(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of a request that is not streamed, from the worker's JSON."""
        text, thinking = self._read(answer)
        return self._last(text, thinking)

    def nothing(self, reason: str) -> dict[str, Any]:
        """The answer of a request that only loads or unloads a model (``reason``)."""
        return {**self._about("", ""), "done": True, "done_reason": reason}

    def _lines(self, block: bytes) -> bytes:
        data = b"".join(line[5:].strip() for line in block.splitlines() if line.startswith(b"data:"))
        if self.ended or not data or data == b"null":
            return b""
        if data == b"[DONE]":
            self.ended = True
            return _line(self._last("", ""))
        try:
            event = json.loads(data)
        except ValueError:
            event = {"error": {"message": "the worker sent an event that is not JSON"}}
        if isinstance(error := event.get("error"), dict):
            self.ended = True
            return _line({"error": str(error.get("message", ""))})
        text, thinking = self._read(event)
        if event.get("stop") is True:  # the last event of /completion; chats end with [DONE]
            self.ended = True
            return _line(self._last(text, thinking))
        return _line({**self._about(text, thinking), "done": False}) if text or thinking else b""

    def _read(self, event: Mapping[str, Any]) -> tuple[str, str]:
        """The text and the thoughts in a worker's event or answer; figures and tool calls are noted."""
        if "timings" in event or "usage" in event:
            self._note_figures(event)
        if "content" in event:
            self._reason = "length" if event.get("stop_type") == "limit" else "stop"
            return event["content"], ""
        for choice in event.get("choices", ()):
            if choice.get("finish_reason"):
                self._reason = "length" if choice["finish_reason"] == "length" else "stop"
            part = choice.get("delta") or choice.get("message") or {}
            for number, call in enumerate(part.get("tool_calls") or ()):
                known = self._calls.setdefault(call.get("index", number), {"name": "", "arguments": ""})
                for key, piece in (call.get("function") or {}).items():
                    known[key] = known.get(key, "") + (piece or "")
            return part.get("content") or "", part.get("reasoning_content") or ""
        return "", ""

    def _note_figures(self, event: Mapping[str, Any]) -> None:
        timings, usage = event.get("timings") or {}, event.get("usage") or {}
        figures = {
            "prompt_eval_count": usage.get("prompt_tokens", event.get("tokens_evaluated")),
            "prompt_eval_duration": _nanoseconds(timings.get("prompt_ms")),
            "eval_count": usage.get("completion_tokens", event.get("tokens_predicted")),
            "eval_duration": _nanoseconds(timings.get("predicted_ms")),
        }
        self._figures |= {name: value for name, value in figures.items() if value is not None}

    def _last(self, text: str, thinking: str) -> dict[str, Any]:
        last = {**self._about(text, thinking), "done": True, "done_reason": self._reason or "stop"}
        if self._calls and self.text_field == "message":
            last["message"]["tool_calls"] = [_tool_call(call) for _, call in sorted(self._calls.items())]
        total = time.perf_counter_ns() - self._began
        return {**last, "total_duration": total, "load_duration": 0, **self._figures}

    def _about(self, text: str, thinking: str) -> dict[str, Any]:
        about: dict[str, Any] = {"model": self.model, "created_at": now()}
        thoughts = {"thinking": thinking} if thinking else {}
        if self.text_field == "message":
            return {**about, "message": {"role": "assistant", "content": text, **thoughts}}
        return {**about, "response": text, **thoughts}


def embed_answer(model: str, answer: Mapping[str, Any], nanoseconds: int) -> dict[str, Any]:
    """The answer of ``/api/embed``, from OpenAI's; ``nanoseconds``: how long it took."""
    data = sorted(answer["data"], key=lambda item: item["index"])
    return {
        "model": model,
        "embeddings": [item["embedding"] for item in data],
        "total_duration": nanoseconds,
        "load_duration": 0,
        "prompt_eval_count": (answer.get("usage") or {}).get("prompt_tokens", 0),
    }


@dataclass(frozen=True)
class ModelFacts:
    """What lists show of a model: the base, or an adapter on it."""

    name: str
    digest: str
    """Hex SHA-256 of its content."""
    size: int
    """Bytes."""
    modified_at: datetime
    family: str
    """The architecture."""
    parameter_size: str
    """``134.52M``; see human_number."""
    quantization_level: str
    parent_model: str = ""
    """The base model's name, for an adapter."""

    def details(self) -> dict[str, Any]:
        """``details``, as lists and ``/api/show`` have them."""
        return {
            "parent_model": self.parent_model,
            "format": "gguf",
            "family": self.family,
            "families": [self.family],
            "parameter_size": self.parameter_size,
            "quantization_level": self.quantization_level,
        }

    def listed(self) -> dict[str, Any]:
        """The entry of a list."""
        name = self.name if ":" in self.name else f"{self.name}:latest"
        return {"name": name, "model": name, "size": self.size, "digest": self.digest, "details": self.details()}


def tags_answer(models: Sequence[ModelFacts]) -> dict[str, Any]:
    """The answer of ``/api/tags``."""
    return {"models": [{**model.listed(), "modified_at": _time(model.modified_at)} for model in models]}


def ps_answer(models: Sequence[ModelFacts], context_length: int) -> dict[str, Any]:
    """The answer of ``/api/ps``: models in memory, for as long as the server runs."""
    more = {"expires_at": _FOREVER, "size_vram": 0, "context_length": context_length}
    return {"models": [{**model.listed(), **more} for model in models]}


def show_answer(model: ModelFacts, *, template: str, model_info: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of ``/api/show``; ``model_info``: the base's GGUF metadata."""
    return {
        "modelfile": f"FROM {model.parent_model or model.name}\n",
        "parameters": "",
        "template": template,
        "details": model.details(),
        "model_info": dict(model_info),
        "capabilities": ["completion"],
        "modified_at": _time(model.modified_at),
    }


def human_number(value: int) -> str:
    """``134.52M``, ``1.1B``: how Ollama writes numbers of parameters."""
    for limit, unit, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 2)):
        if value >= limit:
            return f"{value / limit:.{digits}f}{unit}"
    return str(value)


def now() -> str:
    """The time as Ollama writes it."""
    return _time(datetime.now(timezone.utc))


def _time(moment: datetime) -> str:
    return moment.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _nanoseconds(milliseconds: float | None) -> int | None:
    return None if milliseconds is None else int(milliseconds * 1e6)


def _tool_call(call: Mapping[str, str]) -> dict[str, Any]:
    """Ollama's form: the arguments are an object; text that is no JSON stays what it is, under ``arguments``."""
    try:
        arguments = json.loads(call["arguments"] or "{}")
    except ValueError:
        arguments = {"arguments": call["arguments"]}
    return {"function": {"name": call["name"], "arguments": arguments}}


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(errors="replace") + b"\n"
