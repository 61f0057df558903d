"""One generation on its way through the engine: all its state in one place."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from loraproxy.errors import ApiError
from loraproxy.worker.delta import NativeSet, native_set
from loraproxy.worker.sampling import Sampler
from loraproxy.worker.text import TextStream
from loraproxy.worker.types import Event, Generation, StopReason, Timings

Sink = Callable[["Event | ApiError"], None]


@dataclass(eq=False)
class Sequence:
    """A generation with its slot, its tokens and its clocks.

    Waiting: ``slot`` < 0. Prefilling: ``n_past`` < len(prompt). Decoding: the prompt is in the KV cache and
    ``tokens[-1]`` is the next token to decode. ``n_past`` counts the cells of the slot that hold its tokens.
    """

    task_id: int
    generation: Generation
    sampler: Sampler
    sink: Sink
    slot: int = -1
    n_past: int = 0
    n_cached: int = 0
    """Prompt tokens that came from the prompt cache."""
    tokens: list[int] = field(default_factory=list)
    """The prompt and what was generated."""
    cancelled: bool = False
    finished: bool = False
    started: float = 0.0
    """When the first prompt chunk began (seconds, monotonic)."""
    prefilled: float = 0.0
    """When the prompt was done."""
    first_token: float = 0.0
    last_token: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = list(self.generation.prompt)
        self.text = TextStream(self.generation.stop)
        self.native_set: NativeSet = native_set(self.generation.adapters)

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.generation.prompt)

    @property
    def n_decoded(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.n_prompt

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens are still to be decoded."""
        return self.n_past < self.n_prompt

    @property
    def n_remain(self) -> int:
        """Tokens that may still be generated; -1: no limit."""
        limit = self.generation.n_predict
        return -1 if limit < 0 else max(limit - self.n_decoded, 0)

    def timings(self) -> Timings:
        """llama-server's timings up to now. As there, decoding is timed from the end of the prompt."""
        prompt_end = self.prefilled or time.monotonic()
        return Timings(
            cache_n=self.n_cached,
            prompt_n=max(min(self.n_past, self.n_prompt) - self.n_cached, 0),
            prompt_ms=(prompt_end - self.started) * 1e3 if self.started else 0.0,
            predicted_n=self.n_decoded,
            predicted_ms=(self.last_token - self.prefilled) * 1e3 if self.last_token else 0.0,
        )

    def stop_reason(self, n_ctx: int, is_eog: bool) -> StopReason | None:
        """Why the generation ends with the token just added, in llama-server's order (process_token)."""
        if self.text.stopping_word:
            return "word"
        if is_eog:
            return "eos"
        if self.n_remain == 0 or self.is_full(n_ctx) or self._out_of_time():
            return "limit"
        return None

    def is_full(self, n_ctx: int) -> bool:
        """Whether no cell is left for the token just added."""
        return len(self.tokens) >= n_ctx

    def _out_of_time(self) -> bool:
        limit = self.generation.t_max_predict_ms
        return bool(limit > 0 and self.text.has_new_line and (self.last_token - self.first_token) * 1e3 > limit)
