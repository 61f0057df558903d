"""OpenAI's completion APIs: ``/v1/completions`` and ``/v1/chat/completions``, with llama-server's additions."""

from __future__ import annotations

import secrets
import string
import time
from collections.abc import Sequence
from typing import Any

from loraproxy import __version__
from loraproxy.worker.answers import (
    Part,
    Result,
    dumps,
    finish_reason,
    probability_view,
    progress_json,
    sse,
    timings_json,
    usage_json,
)
from loraproxy.worker.params import CompletionParams
from loraproxy.worker.types import Done, Generation

FINGERPRINT = f"loraproxy-{__version__}"
_ID_LETTERS = string.digits + string.ascii_letters


def completion_id() -> str:
    """A new id, as llama-server makes them."""
    return "chatcmpl-" + "".join(secrets.choice(_ID_LETTERS) for _ in range(32))


class _OpenAIAnswer:
    end = b"data: [DONE]\n\n"
    object: str

    def __init__(self, params: CompletionParams, alias: str) -> None:
        self._params = params
        self._alias = alias
        self._view = probability_view(params)
        self._id = completion_id()
        self._created = int(time.time())

    def _plain(self, part: Part) -> bool:
        """True where a part is nothing but text."""
        return part.probs is None and part.progress is None and not self._params.timings_per_token

    def _with_extras(self, event: dict[str, Any], part: Part) -> dict[str, Any]:
        if self._params.timings_per_token:
            event["timings"] = timings_json(part.timings)
        if part.progress is not None:
            event["prompt_progress"] = progress_json(part.progress)
        return event

    def _logprobs(self, result: Result) -> dict[str, Any] | None:
        return {"content": self._view.tokens(result.probs)} if result.probs else None


class CompletionAnswer(_OpenAIAnswer):
    """Answers of ``/v1/completions``."""

    object = "text_completion"

    def __init__(self, params: CompletionParams, alias: str) -> None:
        super().__init__(params, alias)
        self._tail = b"," + dumps(self._about())[1:] + b"\n\n"

    def part(self, index: int, part: Part) -> bytes:
        """One event for every token."""
        if self._plain(part):
            return (
                b'data: {"choices":[{"text":%b,"index":%d,"logprobs":null,"finish_reason":null}]'
                % (dumps(part.text), index)
                + self._tail
            )
        logprobs = None if part.probs is None else {"content": self._view.tokens([part.probs])}
        choice = {"text": part.text, "index": index, "logprobs": logprobs, "finish_reason": None}
        return sse(self._with_extras({"choices": [choice], **self._about()}, part))

    def finish(self, index: int, generation: Generation, done: Done) -> bytes:
        """The final event, with usage and timings."""
        return sse(self.whole([Result(index, generation, done)]))

    def whole(self, results: Sequence[Result]) -> Any:
        """One object with a choice for each completion."""
        choices = [
            {
                "text": result.content,
                "index": result.index,
                "logprobs": self._logprobs(result),
                "finish_reason": finish_reason(result.done),
            }
            for result in results
        ]
        about = self._about()
        about_id = about.pop("id")
        usage = usage_json([(result.generation, result.done) for result in results])
        timings = timings_json(results[0].done.timings)
        return {"choices": choices, **about, "usage": usage, "id": about_id, "timings": timings}

    def _about(self) -> dict[str, Any]:
        return {
            "created": self._created,
            "model": self._alias,
            "system_fingerprint": FINGERPRINT,
            "object": self.object,
            "id": self._id,
        }


class ChatAnswer(_OpenAIAnswer):
    """Answers of ``/v1/chat/completions``."""

    object = "chat.completion.chunk"

    def __init__(self, params: CompletionParams, alias: str, prefill: str = "", streamed_prefill: str = "") -> None:
        """``prefill``: how the request began the answer; repeated at the start of a whole answer, or of a stream."""
        super().__init__(params, alias)
        self._prefill = prefill
        self._streamed_prefill = streamed_prefill
        self._tail = b"}}]," + dumps(self._about())[1:] + b"\n\n"
        self._opened: set[int] = set()

    def part(self, index: int, part: Part) -> bytes:
        """An event with the role for progress and before the first token, then one for every piece of text."""
        if part.progress is not None:
            return sse(self._with_extras(self._role(index), part))
        text, events = part.text, b""
        if index not in self._opened:
            self._opened.add(index)
            role = self._role(index)
            text = self._streamed_prefill + text
            if not text:
                return sse(self._with_logprobs(role, part))
            events = sse(role)
        if not text:
            return events
        if self._plain(part):
            head = b'data: {"choices":[{"finish_reason":null,"index":%d,"delta":{"content":' % index
            return events + head + dumps(text) + self._tail
        return events + sse(self._with_logprobs(self._chunk(index, {"content": text}), part))

    def finish(self, index: int, generation: Generation, done: Done) -> bytes:
        """The event with the finish reason, then usage if asked for; timings in the last of them."""
        last = self._chunk(index, {})
        last["choices"][0]["finish_reason"] = finish_reason(done)
        events = [last]
        if self._params.include_usage:
            events.append({"choices": [], **self._about(), "usage": usage_json([(generation, done)])})
        events[-1]["timings"] = timings_json(done.timings)
        return b"".join(map(sse, events))

    def whole(self, results: Sequence[Result]) -> Any:
        """One object with a choice for each completion."""
        choices = []
        for result in results:
            choice: dict[str, Any] = {
                "finish_reason": finish_reason(result.done),
                "index": result.index,
                "message": {"role": "assistant", "content": self._prefill + result.content},
            }
            if result.probs:
                choice["logprobs"] = self._logprobs(result)
            choices.append(choice)
        return {
            "choices": choices,
            "created": self._created,
            "model": self._alias,
            "system_fingerprint": FINGERPRINT,
            "object": "chat.completion",
            "usage": usage_json([(result.generation, result.done) for result in results]),
            "id": self._id,
            "timings": timings_json(results[0].done.timings),
        }

    def _with_logprobs(self, chunk: dict[str, Any], part: Part) -> dict[str, Any]:
        if part.probs is not None:
            chunk["choices"][0]["logprobs"] = {"content": self._view.tokens([part.probs])}
        return self._with_extras(chunk, part)

    def _role(self, index: int) -> dict[str, Any]:
        return self._chunk(index, {"role": "assistant", "content": None})

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"choices": [{"finish_reason": None, "index": index, "delta": delta}], **self._about()}

    def _about(self) -> dict[str, Any]:
        return {
            "created": self._created,
            "id": self._id,
            "model": self._alias,
            "system_fingerprint": FINGERPRINT,
            "object": self.object,
        }
