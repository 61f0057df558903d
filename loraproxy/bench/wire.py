"""What the benchmark tells the process that drives a server, and what it hears back: a line of JSON each way."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable

from loraproxy.config import Strict


class StreamJob(Strict):
    """One request: its prompt, and the adapter it runs under at scale 1 (None: the base model)."""

    prompt: str
    adapter: int | None = None


class Job(Strict):
    """Requests that all start at once, each generating ``n_predict`` tokens greedily, end of text ignored."""

    streams: tuple[StreamJob, ...]
    n_predict: int


class StreamTimes(Strict):
    """When one stream's request was sent and each of its events arrived, in seconds; how many tokens it was."""

    sent: float
    arrivals: tuple[float, ...]
    n_tokens: int
    n_prompt: int


class JobTimes(Strict):
    """What came of a job; ``error`` says why it failed, else it is empty."""

    streams: tuple[StreamTimes, ...] = ()
    error: str = ""


async def answer_jobs(run: Callable[[Job], Awaitable[tuple[StreamTimes, ...]]]) -> None:
    """Read jobs from standard input, ``run`` each, and write its times, until the input ends.

    Reading holds up the event loop, as nothing else runs between two jobs.
    """
    for line in sys.stdin:
        try:
            times = JobTimes(streams=await run(Job.model_validate_json(line)))
        except Exception as problem:
            times = JobTimes(error=f"{type(problem).__name__}: {problem}")
        print(times.model_dump_json(), flush=True)
