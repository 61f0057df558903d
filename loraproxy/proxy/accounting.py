"""What one request that generates did: its times, its tokens and its outcome, told to the metrics when it ends."""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from aiohttp import web

from loraproxy.errors import ApiError
from loraproxy.metrics import INTER_TOKEN_BOUNDS, Metrics

_TIMINGS = b'"timings":'
"""In every answer's last event, and in all where ``timings_per_token`` is asked for. Inside text its quotes would be
escaped, so it is never part of what was generated."""
_KEY: Any = web.RequestKey("account", object) if hasattr(web, "RequestKey") else "account"  # a word before 3.14
_DONE = b"data: [DONE]\n\n"
_PLACE = re.compile(rb'"index":\s*(\d+)|"timings":\s*\{([^}]*)\}')
_COUNT = re.compile(rb'"(cache_n|prompt_n|predicted_n)":\s*(\d+)')
_USAGE = re.compile(rb'"(prompt_tokens|completion_tokens|cached_tokens)":\s*(\d+)')
_LAST = re.compile(rb'"finish_reason":\s*"|"stop":\s*true|"choices":\s*\[\]')


@dataclass(frozen=True)
class Tokens:
    """The tokens of a request: of its prompt computed and taken from the cache, and generated."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0


class Account:
    """One request's, made when it arrives."""

    def __init__(self, metrics: Metrics, endpoint: str) -> None:
        self.arrived = perf_counter()
        self.endpoint = endpoint
        self.adapters: tuple[str, ...] | None = None
        """The names it runs under, once they are known."""
        self.label = ""
        """The adapter set, written as in ``X-LoRA``."""
        self.outcome = ""
        """``ok``, ``refused``, ``unavailable``, ``error`` or ``cancelled``; empty until it is known."""
        self.queued: float | None = None
        """Seconds from arrival until it was sent to a worker."""
        self.first: float | None = None
        """Seconds from arrival to the first bytes of a streamed answer."""
        self._metrics = metrics
        self._last = 0.0
        self._gaps = [0] * (len(INTER_TOKEN_BOUNDS) + 1)
        self._gap_seconds = 0.0
        self._timings: dict[bytes, Tokens] = {}
        self._usage: Tokens | None = None

    @property
    def tokens(self) -> Tokens:
        """What the answer says of its tokens; zeros where it ended before it could."""
        if self._usage is not None:
            return self._usage
        parts = self._timings.values()
        return Tokens(sum(p.prompt for p in parts), sum(p.cached for p in parts), sum(p.generated for p in parts))

    def under(self, names: tuple[str, ...], label: str) -> None:
        """Its adapters are known."""
        self.adapters, self.label = names, label

    def began(self) -> None:
        """It has a worker, and its adapters are loaded there."""
        if self.queued is None:
            self.queued = perf_counter() - self.arrived
            self._metrics.queued(self.queued)

    def chunk(self, data: bytes) -> None:
        """Bytes of a streamed answer. Called for every token of every stream, so it does next to nothing."""
        now = perf_counter()
        if self.first is None:
            self.first = now - self.arrived
            self._metrics.first_token(self.first)
            self._last = now
            if _TIMINGS in data:
                self._note(data)
            return
        gap, self._last = now - self._last, now
        if data == _DONE or (_TIMINGS in data and self._note(data)):
            return  # no token
        self._gaps[bisect_left(INTER_TOKEN_BOUNDS, gap)] += 1
        self._gap_seconds += gap

    def whole(self, body: bytes) -> None:
        """The body of an answer that is not streamed."""
        usage = {name: int(count) for name, count in _USAGE.findall(body)} if b'"usage":' in body else {}
        if usage:
            cached = usage.get(b"cached_tokens", 0)
            prompt = usage.get(b"prompt_tokens", 0) - cached
            self._usage = Tokens(max(prompt, 0), cached, usage.get(b"completion_tokens", 0))
        else:
            self._note(body)

    def counted(self, tokens: Tokens) -> None:
        """The tokens of an answer that says them in its own way."""
        self._usage = tokens

    def cut_off(self, outcome: str) -> None:
        """The answer ended early, after its status was sent: ``error`` or ``cancelled``."""
        self.outcome = outcome

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Tells the metrics when the block ends; an exception from it is the outcome."""
        try:
            yield
        except ApiError as error:
            self.outcome = outcome_of(error.status)
            raise
        except asyncio.CancelledError:
            self.outcome = "cancelled"
            raise
        finally:
            self.outcome = self.outcome or "error"
            self._tell()

    def answered(self, answer: web.StreamResponse) -> None:
        """The answer was sent, or as much of it as :meth:`cut_off` left."""
        self.outcome = self.outcome or outcome_of(answer.status)

    def _note(self, data: bytes) -> bool:
        """Read the timings in ``data``; the last of each generation stand. True where these are a generation's last."""
        index = b"0"
        for found in _PLACE.finditer(data):
            if found[1] is not None:
                index = found[1]
                continue
            counts = {name: int(count) for name, count in _COUNT.findall(found[2])}
            self._timings[index] = Tokens(
                counts.get(b"prompt_n", 0), counts.get(b"cache_n", 0), counts.get(b"predicted_n", 0)
            )
        return _LAST.search(data) is not None

    def _tell(self) -> None:
        metrics, label = self._metrics, self._metrics.adapter_label(self.adapters)
        metrics.finished(self.endpoint, label, self.outcome, perf_counter() - self.arrived)
        tokens = self.tokens
        metrics.tokens(label, tokens.prompt, tokens.cached, tokens.generated)
        if self._gap_seconds:
            metrics.inter_token(self._gaps, self._gap_seconds)


def open_account(request: web.Request, metrics: Metrics, endpoint: str) -> Account:
    """A new account, which :func:`account_of` gives from now on. ``endpoint``: one of a fixed list of paths."""
    account = Account(metrics, endpoint)
    request[_KEY] = account
    return account


def account_of(request: web.Request) -> Account | None:
    """The account of a request that generates."""
    account: Account | None = request.get(_KEY)
    return account


def outcome_of(status: int) -> str:
    """An answer's outcome by its status."""
    if status < 400:
        return "ok"
    if status < 500:
        return "refused"
    return "unavailable" if status == 503 else "error"
