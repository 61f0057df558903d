"""What the HTTP application asks of the engine, and what the engine answers.

The HTTP application builds a :class:`Generation` and iterates over the events that the engine yields for
it; nothing else crosses between the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from loraproxy.adapters.sets import BASE, AdapterSet

StopReason = Literal["eos", "limit", "word", "none"]
"""``none``: nothing was generated, since the prompt was empty."""


@dataclass(frozen=True)
class SamplingParams:
    """llama-server's sampling parameters, under its names and with its defaults (common/common.h)."""

    seed: int = 0xFFFFFFFF
    """LLAMA_DEFAULT_SEED (2**32 - 1) draws a random seed."""
    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    typical_p: float = 1.0
    repeat_last_n: int = 64
    """0 disables; -1 means the whole context."""
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    min_keep: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias); -inf forbids the token. Resolved from strings by the HTTP application."""
    ignore_eos: bool = False
    grammar: str = ""
    """GBNF; a JSON schema is converted to it by the HTTP application."""
    samplers: tuple[str, ...] = (
        "penalties",
        "dry",
        "top_n_sigma",
        "top_k",
        "typ_p",
        "top_p",
        "min_p",
        "xtc",
        "temperature",
    )


@dataclass(frozen=True)
class Generation:
    """One prompt and how to complete it. One HTTP request is one or several of these."""

    prompt: tuple[int, ...]
    """Token ids, BOS included where the model wants one; never empty."""
    adapters: AdapterSet = BASE
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n_predict: int = -1
    """At most this many tokens; -1: until the context is full; 0: evaluate the prompt only."""
    stop: tuple[str, ...] = ()
    n_probs: int = 0
    """How many of the most likely tokens to report with each generated token; 0: none."""
    post_sampling_probs: bool = False
    cache_prompt: bool = True
    t_max_predict_ms: float = 0.0
    return_progress: bool = False


@dataclass(frozen=True)
class Candidate:
    """A token with its probability; ``logprob`` is the natural logarithm of ``prob``."""

    id: int
    piece: bytes
    logprob: float
    prob: float

    @classmethod
    def of_logprob(cls, token: int, piece: bytes, logprob: float) -> Candidate:
        """From a log-probability."""
        return cls(token, piece, logprob, math.exp(logprob))

    @classmethod
    def of_prob(cls, token: int, piece: bytes, prob: float) -> Candidate:
        """From a probability; 0 has the log-probability -inf."""
        return cls(token, piece, math.log(prob) if prob > 0.0 else -math.inf, prob)


@dataclass(frozen=True)
class TokenProbs:
    """The chosen token and the ``n_probs`` most likely ones, most likely first."""

    chosen: Candidate
    top: tuple[Candidate, ...]


@dataclass(frozen=True)
class Progress:
    """A prompt chunk was evaluated (only with ``return_progress``). Counts are tokens."""

    total: int
    cache: int
    processed: int
    time_ms: float


@dataclass(frozen=True)
class Timings:
    """llama-server's ``timings``; times in milliseconds, counts in tokens."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float


@dataclass(frozen=True)
class Token:
    """One generated token.

    ``text`` is what may be shown now: "" while a stop string or a UTF-8 character is incomplete. The
    concatenation of all texts of a generation is its ``content``.
    """

    id: int
    text: str
    probs: TokenProbs | None
    timings: Timings


@dataclass(frozen=True)
class Done:
    """The generation ended; always the last event.

    ``text`` is what was held back and turned out to be no stop string. ``truncated``: the context was full.
    """

    text: str
    reason: StopReason
    stopping_word: str
    timings: Timings
    truncated: bool
    has_new_line: bool
    tokens_cached: int
    """How many tokens of this sequence are in the KV cache at the end (llama-server's ``n_past``)."""


Event = Progress | Token | Done


@dataclass(frozen=True)
class SlotView:
    """What ``GET /slots`` shows of one slot."""

    id: int
    id_task: int
    n_ctx: int
    generation: Generation | None
    """None: idle."""
    n_prompt_tokens: int
    n_decoded: int
    n_remain: int
    has_new_line: bool
    n_prompt_tokens_processed: int = 0
    n_prompt_tokens_cache: int = 0


@dataclass
class EngineCounters:
    """Totals since the start, for ``GET /metrics``; times in seconds. The engine counts up its own instance."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    predicted_tokens: int = 0
    predicted_seconds: float = 0.0
    decodes: int = 0
    busy_slots: int = 0
    """Sum over decodes of the slots that took part."""
    n_tokens_max: int = 0
    processing: int = 0
    deferred: int = 0
    prompt_tokens_cached: int = 0
