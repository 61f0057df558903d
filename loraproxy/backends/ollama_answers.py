"""Ollama's answers in the shapes of llama-server's ``/completion`` and of OpenAI's completion APIs.

The shapes are those of the embedded worker, as far as Ollama says enough: it reports no token ids, no probabilities,
and does not tell the end of the text from a stop string. Its durations are nanoseconds.
"""

from __future__ import annotations

import json
import secrets
import string
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from loraproxy.errors import ApiError

_ID_LETTERS = string.digits + string.ascii_letters
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def dumps(value: Any) -> bytes:
    """Compact JSON in UTF-8; a lone surrogate becomes a question mark."""
    return _encode(value).encode(errors="replace")


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % dumps(value)


def sse_error(error: ApiError) -> bytes:
    """How an error is told after a stream has begun."""
    return sse(error.body())


class Answer(Protocol):
    """How one API shows one answer of Ollama's."""

    end: bytes
    """What closes a stream."""

    def event(self, event: Mapping[str, Any]) -> bytes:
        """Server-sent events for one object of Ollama's stream, the last included."""

    def whole(self, text: str, thinking: str, last: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of a request that is not streamed; ``last`` is the last object of Ollama's stream."""


async def collected(answer: Answer, events: AsyncIterator[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON answer of a request that is not streamed."""
    texts, thoughts = [], []
    last: Mapping[str, Any] = {}
    async for last in events:
        texts.append(text_of(last))
        thoughts.append(thinking_of(last))
    return answer.whole("".join(texts), "".join(thoughts), last)


def text_of(event: Mapping[str, Any]) -> str:
    """The piece of text in an object of ``/api/generate`` or ``/api/chat``."""
    return str((event.get("message") or {}).get("content") or event.get("response") or "")


def thinking_of(event: Mapping[str, Any]) -> str:
    """The piece of a thinking model's thoughts in it."""
    return str((event.get("message") or {}).get("thinking") or event.get("thinking") or "")


def timings(last: Mapping[str, Any]) -> dict[str, Any]:
    """llama-server's ``timings``. Ollama does not say how much of a prompt it had cached."""
    prompt_n, predicted_n = last.get("prompt_eval_count", 0), last.get("eval_count", 0)
    prompt_ms, predicted_ms = last.get("prompt_eval_duration", 0) / 1e6, last.get("eval_duration", 0) / 1e6
    return {
        "cache_n": 0,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt_n if prompt_n else 0.0,
        "prompt_per_second": 1e3 * prompt_n / prompt_ms if prompt_ms else 0.0,
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / predicted_n if predicted_n else 0.0,
        "predicted_per_second": 1e3 * predicted_n / predicted_ms if predicted_ms else 0.0,
    }


def usage(last: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's ``usage``."""
    prompt, completion = last.get("prompt_eval_count", 0), last.get("eval_count", 0)
    return {
        "completion_tokens": completion,
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def finish_reason(last: Mapping[str, Any]) -> str:
    """OpenAI's ``finish_reason``."""
    return "length" if last.get("done_reason") == "length" else "stop"


@dataclass
class NativeAnswer:
    """llama-server's ``/completion``; ``request`` is what Ollama was asked, ``alias`` the model's public name."""

    request: Mapping[str, Any]
    alias: str
    end: bytes = b""
    _pieces: int = 0
    _new_line: bool = False

    def event(self, event: Mapping[str, Any]) -> bytes:
        """One event for every object."""
        text = text_of(event)
        self._new_line |= "\n" in text
        if event.get("done"):
            last = {**event, "response": ""}
            before = b"" if not text else sse(self._part(text))
            return before + sse(self.whole("", "", last))
        return sse(self._part(text))

    def whole(self, text: str, thinking: str, last: Mapping[str, Any]) -> dict[str, Any]:
        """The last object; of a stream it has no content."""
        reason = last.get("done_reason")
        options = self.request.get("options", {})
        return {
            "index": 0,
            "content": text,
            "tokens": [],
            "id_slot": -1,
            "stop": True,
            "model": self.alias,
            "tokens_predicted": last.get("eval_count", 0),
            "tokens_evaluated": last.get("prompt_eval_count", 0),
            "generation_settings": {
                **{
                    name: value for name, value in options.items() if name not in ("num_predict", "num_keep", "num_ctx")
                },
                "n_predict": options.get("num_predict", -1),
                "n_keep": options.get("num_keep", 0),
            },
            "prompt": self.request.get("prompt", ""),
            "has_new_line": self._new_line or "\n" in text,
            "truncated": False,
            "stop_type": {"length": "limit", "load": "none"}.get(str(reason), "eos"),
            "stopping_word": "",
            "tokens_cached": last.get("prompt_eval_count", 0) + last.get("eval_count", 0),
            "timings": timings(last),
        }

    def _part(self, text: str) -> dict[str, Any]:
        self._pieces += 1
        about = {"tokens": [], "stop": False, "id_slot": -1, "tokens_predicted": self._pieces, "tokens_evaluated": 0}
        return {"index": 0, "content": text, **about}


def _completion_id() -> str:
    return "chatcmpl-" + "".join(secrets.choice(_ID_LETTERS) for _ in range(32))


@dataclass
class CompletionAnswer:
    """OpenAI's ``/v1/completions``."""

    alias: str
    end: bytes = b"data: [DONE]\n\n"
    _id: str = field(default_factory=_completion_id)
    _created: int = field(default_factory=lambda: int(time.time()))

    def event(self, event: Mapping[str, Any]) -> bytes:
        """An event for every piece of text, and a last one with the finish reason, usage and timings."""
        text = text_of(event)
        part = b""
        if text or not event.get("done"):
            choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": None}
            part = sse({"choices": [choice], **self._about()})
        return part + sse(self.whole("", "", event)) if event.get("done") else part

    def whole(self, text: str, thinking: str, last: Mapping[str, Any]) -> dict[str, Any]:
        """One object with one choice."""
        choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": finish_reason(last)}
        return {"choices": [choice], **self._about(), "usage": usage(last), "timings": timings(last)}

    def _about(self) -> dict[str, Any]:
        return {"created": self._created, "model": self.alias, "object": "text_completion", "id": self._id}


@dataclass
class ChatAnswer:
    """OpenAI's ``/v1/chat/completions``; a thinking model's thoughts are llama-server's ``reasoning_content``."""

    alias: str
    include_usage: bool = False
    """As ``stream_options`` has it."""
    end: bytes = b"data: [DONE]\n\n"
    _id: str = field(default_factory=_completion_id)
    _created: int = field(default_factory=lambda: int(time.time()))
    _opened: bool = False

    def event(self, event: Mapping[str, Any]) -> bytes:
        """The role first, then the pieces of text, at last the finish reason, and the usage if it was asked for."""
        events = []
        if not self._opened:
            self._opened = True
            events.append(self._chunk({"role": "assistant", "content": None}))
        if thinking := thinking_of(event):
            events.append(self._chunk({"reasoning_content": thinking}))
        if text := text_of(event):
            events.append(self._chunk({"content": text}))
        if event.get("done"):
            events.append(self._chunk({}, finish_reason(event)))
            if self.include_usage:
                events.append({"choices": [], **self._about("chat.completion.chunk"), "usage": usage(event)})
            events[-1]["timings"] = timings(event)
        return b"".join(map(sse, events))

    def whole(self, text: str, thinking: str, last: Mapping[str, Any]) -> dict[str, Any]:
        """One object with one choice."""
        message = {"role": "assistant", "content": text, **({"reasoning_content": thinking} if thinking else {})}
        choice = {"finish_reason": finish_reason(last), "index": 0, "message": message}
        about = self._about("chat.completion")
        return {"choices": [choice], **about, "usage": usage(last), "timings": timings(last)}

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"finish_reason": reason, "index": 0, "delta": delta}
        return {"choices": [choice], **self._about("chat.completion.chunk")}

    def _about(self, kind: str) -> dict[str, Any]:
        return {"created": self._created, "id": self._id, "model": self.alias, "object": kind}
