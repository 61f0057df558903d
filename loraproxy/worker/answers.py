"""What the answers of every completion API share: the job behind them, timings, usage, probabilities, SSE framing.

Shapes and key order are those of the ``to_json`` functions in tools/server/server-task.cpp.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from loraproxy.errors import ApiError
from loraproxy.worker.fields import FLOAT32_MAX
from loraproxy.worker.params import CompletionParams
from loraproxy.worker.types import Candidate, Done, Generation, Progress, Timings, Token, TokenProbs

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def dumps(value: Any) -> bytes:
    """Compact JSON in UTF-8; a lone surrogate, which no valid text has, becomes a question mark."""
    return _encode(value).encode(errors="replace")


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % dumps(value)


def sse_error(error: ApiError) -> bytes:
    """How an error is told after a stream has begun."""
    return sse(error.body())


@dataclass(frozen=True)
class Part:
    """One piece of a streamed completion: a token, progress on the prompt, or text that was held back."""

    text: str
    tokens: tuple[int, ...]
    probs: TokenProbs | None
    timings: Timings
    progress: Progress | None = None

    @classmethod
    def of_token(cls, token: Token) -> Part:
        """A generated token."""
        return cls(token.text, (token.id,), token.probs, token.timings)

    @classmethod
    def of_progress(cls, progress: Progress) -> Part:
        """A prompt chunk that was evaluated."""
        timings = Timings(progress.cache, progress.processed - progress.cache, progress.time_ms, 0, 0.0)
        return cls("", (), None, timings, progress)

    @classmethod
    def of_rest(cls, done: Done) -> Part:
        """Text that turned out to be no stop string."""
        return cls(done.text, (), None, done.timings)


@dataclass
class Result:
    """Everything one generation gave."""

    index: int
    generation: Generation
    done: Done
    content: str = ""
    tokens: list[int] = field(default_factory=list)
    probs: list[TokenProbs] = field(default_factory=list)


class Answer(Protocol):
    """How one API shows the generations of one request."""

    end: bytes
    """What closes a stream after its last generation."""

    def part(self, index: int, part: Part) -> bytes:
        """Server-sent events for a piece of generation ``index``; empty where this API shows nothing."""

    def finish(self, index: int, generation: Generation, done: Done) -> bytes:
        """The last server-sent events of generation ``index``."""

    def whole(self, results: Sequence[Result]) -> Any:
        """The JSON answer of a request that is not streamed."""


@dataclass(frozen=True)
class Job:
    """One completion request, ready to run."""

    generations: tuple[Generation, ...]
    params: CompletionParams
    answer: Answer


def finish_reason(done: Done) -> str:
    """OpenAI's ``finish_reason``."""
    return "stop" if done.reason in ("eos", "word") else "length"


def timings_json(t: Timings) -> dict[str, Any]:
    """llama-server's ``timings``; the first token comes with the prompt, so it is no step of its own."""
    steps = max(0, t.predicted_n - 1)
    return {
        "cache_n": t.cache_n,
        "prompt_n": t.prompt_n,
        "prompt_ms": t.prompt_ms,
        "prompt_per_token_ms": t.prompt_ms / t.prompt_n if t.prompt_n else 0.0,
        "prompt_per_second": 1e3 * t.prompt_n / t.prompt_ms if t.prompt_ms > 0 else 0.0,
        "predicted_n": t.predicted_n,
        "predicted_ms": t.predicted_ms,
        "predicted_per_token_ms": t.predicted_ms / steps if steps else 0.0,
        "predicted_per_second": 1e3 * steps / t.predicted_ms if t.predicted_ms > 0 else 0.0,
    }


def progress_json(progress: Progress) -> dict[str, Any]:
    """llama-server's ``prompt_progress``."""
    return {
        "total": progress.total,
        "cache": progress.cache,
        "processed": progress.processed,
        "time_ms": int(progress.time_ms),
    }


def usage_json(results: Sequence[tuple[Generation, Done]]) -> dict[str, Any]:
    """OpenAI's ``usage``, summed over the choices of one answer."""
    prompt = sum(len(generation.prompt) for generation, _ in results)
    completion = sum(done.timings.predicted_n for _, done in results)
    return {
        "completion_tokens": completion,
        "prompt_tokens": prompt,
        "total_tokens": completion + prompt,
        "prompt_tokens_details": {"cached_tokens": sum(done.timings.cache_n for _, done in results)},
    }


def _whole_characters(piece: bytes) -> str:
    """``piece`` without a multi-byte character that is cut off at its end (``validate_utf8``)."""
    for back in range(1, min(4, len(piece)) + 1):
        byte = piece[-back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            if back < needed:
                piece = piece[:-back]
            break
    return piece.decode(errors="replace")


@dataclass(frozen=True)
class ProbabilityView:
    """The names and values under which probabilities are shown."""

    value_key: str
    top_key: str

    def value(self, candidate: Candidate) -> float:
        """The natural logarithm of the probability; of zero, the lowest float32, since JSON has no infinity."""
        return candidate.logprob if math.isfinite(candidate.logprob) else -FLOAT32_MAX

    def candidate(self, candidate: Candidate) -> dict[str, Any]:
        """One token with its probability."""
        return {
            "id": candidate.id,
            "token": _whole_characters(candidate.piece),
            "bytes": list(candidate.piece),
            self.value_key: self.value(candidate),
        }

    def tokens(self, probs: Sequence[TokenProbs]) -> list[dict[str, Any]]:
        """Each generated token with its most likely alternatives."""
        return [
            {**self.candidate(one.chosen), self.top_key: [self.candidate(candidate) for candidate in one.top]}
            for one in probs
        ]


class SampledView(ProbabilityView):
    """Probabilities after the sampling chain, as such."""

    def value(self, candidate: Candidate) -> float:
        """The probability itself."""
        return candidate.prob


def probability_view(params: CompletionParams) -> ProbabilityView:
    """How this request wants probabilities shown."""
    return (
        SampledView("prob", "top_probs") if params.post_sampling_probs else ProbabilityView("logprob", "top_logprobs")
    )
