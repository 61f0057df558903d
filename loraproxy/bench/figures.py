"""From arrival times to figures: tokens per second, time to first token, inter-token latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import median

import numpy as np

from loraproxy.bench.wire import JobTimes


@dataclass(frozen=True)
class Figures:
    """One run, or the medians of several. Times in milliseconds; ``n_prompt`` is the median prompt in tokens."""

    tokens_per_second: float
    """All generated tokens, over the time from the first request to the last token: prompts are included."""
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    n_prompt: float


def figures_of(times: JobTimes) -> Figures:
    """The figures of one run; percentiles are over all its streams, or all their gaps."""
    began = min(stream.sent for stream in times.streams)
    ended = max(stream.arrivals[-1] for stream in times.streams)
    first = [(stream.arrivals[0] - stream.sent) * 1e3 for stream in times.streams]
    gaps = np.concatenate([np.diff(stream.arrivals) for stream in times.streams]) * 1e3
    if gaps.size == 0:
        gaps = np.zeros(1)
    return Figures(
        tokens_per_second=sum(stream.n_tokens for stream in times.streams) / (ended - began),
        ttft_p50=float(np.percentile(first, 50)),
        ttft_p99=float(np.percentile(first, 99)),
        itl_p50=float(np.percentile(gaps, 50)),
        itl_p99=float(np.percentile(gaps, 99)),
        n_prompt=median(stream.n_prompt for stream in times.streams),
    )


def median_of(runs: Sequence[Figures]) -> Figures:
    """The median of each figure over the runs."""
    return Figures(**{field.name: median(getattr(run, field.name) for run in runs) for field in fields(Figures)})
