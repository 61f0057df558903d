"""The workers' own metrics (``llamacpp:*``) as one: those of a single worker as they are, those of several added up.

Each worker counts from its own start, and workers come and go. Totals must not go down for that, so what a worker
had counted when it was last asked stays in the sum after its end.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from loraproxy.backends.llama_server import LlamaServers
from loraproxy.backends.llama_server_places import Reach
from loraproxy.pool.base import Pool

_PATIENCE = aiohttp.ClientTimeout(total=5)
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*(?:\{.*\})?)\s+(\S+)")
_AVERAGES = frozenset({"llamacpp:n_busy_slots_per_decode", "llamacpp:kv_cache_usage_ratio"})
_MAXIMA = frozenset({"llamacpp:n_tokens_max"})
_OURS = "loraproxy_"


@dataclass(frozen=True)
class Source:
    """A server that has metrics; ``key`` is the same for as long as it is."""

    key: object
    session: aiohttp.ClientSession
    url: str
    up: bool = True


def sources(pool: Pool) -> list[Source]:
    """The workers there are, of any kind; llama-servers behind one worker each."""
    found = []
    for worker in pool.reachable():
        backend = worker.backend
        if isinstance(backend, LlamaServers):
            found += [
                Source(place, backend.session, place.client.url, place.reach is Reach.UP)
                for place in backend.places.all
            ]
        else:
            found.append(Source(worker, backend.session, backend.base_url))
    return found


@dataclass
class Text:
    """Metrics in Prometheus's text format, taken apart."""

    about: dict[str, list[str]] = field(default_factory=dict)
    """``# HELP`` and ``# TYPE`` lines by name."""
    samples: dict[str, float] = field(default_factory=dict)
    """By name and labels, as written."""
    kinds: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Text:
        """From what a server answered; lines that are no metrics are left out, and so are names of ours."""
        parsed = cls()
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                name = line.split(" ", 3)[2]
                if not name.startswith(_OURS):
                    parsed.about.setdefault(name, []).append(line)
                    if line.startswith("# TYPE "):
                        parsed.kinds[name] = line.split()[-1]
            elif (found := _SAMPLE.fullmatch(line)) and not line.startswith(_OURS):
                try:
                    parsed.samples[found[1]] = float(found[2])
                except ValueError:
                    continue
        return parsed

    def totals(self) -> dict[str, float]:
        """The samples that only ever grow."""
        return {
            key: value
            for key, value in self.samples.items()
            if self.kinds.get(_name(key)) == "counter" and _name(key) not in _MAXIMA
        }


class WorkerMetrics:
    """What ``/metrics`` shows of the workers."""

    def __init__(self) -> None:
        self._last: dict[object, dict[str, float]] = {}
        """The totals of each worker when it was last asked."""
        self._before: Counter[str] = Counter()
        """What workers had counted that are no more, or began anew."""
        self._asking = asyncio.Lock()

    async def text(self, pool: Pool) -> bytes:
        """The metrics of all workers that answer, as one; empty where none does."""
        async with self._asking:  # two at once would take each other's values for a worker's new beginning
            asked = sources(pool)
            answers = await asyncio.gather(*map(_ask, asked))
            self._forget_all_but({source.key for source in asked})
            texts = []
            for source, answer in zip(asked, answers, strict=True):
                if answer is not None:
                    texts.append(Text.parse(answer))
                    self._remember(source.key, texts[-1].totals())
        given = [answer for answer in answers if answer is not None]
        if len(given) == len(self._last) == 1 and not self._before and _OURS not in given[0]:
            return given[0].encode()
        silent = [self._last[s.key] for s, a in zip(asked, answers, strict=True) if a is None and s.key in self._last]
        return _written(texts, [self._before, *silent])

    def _remember(self, key: object, totals: dict[str, float]) -> None:
        last = self._last.get(key, {})
        if any(totals.get(name, 0.0) < value for name, value in last.items()):  # the server was started anew
            self._add_to_before(last)
        self._last[key] = totals

    def _forget_all_but(self, keys: set[object]) -> None:
        for key in self._last.keys() - keys:
            self._add_to_before(self._last.pop(key))

    def _add_to_before(self, totals: Mapping[str, float]) -> None:
        for name, value in totals.items():
            if value:
                self._before[name] += value  # type: ignore[assignment]


async def _ask(source: Source) -> str | None:
    if not source.up:
        return None
    try:
        async with source.session.get(f"{source.url}/metrics", timeout=_PATIENCE) as answer:
            text = await answer.text("utf-8", "replace")
            return text if answer.status == 200 else None
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError, RuntimeError):
        return None  # it has just ended: an outage of a worker is when the others' figures matter


def _name(sample: str) -> str:
    return sample.partition("{")[0]


def _written(texts: Sequence[Text], more: Sequence[Mapping[str, float]]) -> bytes:
    """One text of ``texts`` and of totals that are counted elsewhere."""
    lines: list[str] = []
    told: set[str] = set()
    for key in dict.fromkeys(key for text in texts for key in text.samples):
        name = _name(key)
        if name not in told:
            told.add(name)
            lines += next((text.about[name] for text in texts if name in text.about), [])
        values = [text.samples[key] for text in texts if key in text.samples]
        if name in _MAXIMA:
            value = max(values)
        elif name in _AVERAGES:
            value = sum(values) / len(values)
        else:
            value = sum(values) + sum(totals.get(key, 0.0) for totals in more)
        lines.append(f"{key} {value:.15g}")
    return "".join(f"{line}\n" for line in lines).encode()
