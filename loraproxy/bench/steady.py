"""Throughput under a steady load: clients that send one request after another, counted over a window of time.

Requests that all start at once show it badly: which of them share the server's first batch is a matter of chance, and
the last of them runs alone. Here their lengths differ, so that at any time some begin, some end and most stream.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from statistics import mean, stdev

from loraproxy.bench.client_process import request_body, run_stream
from loraproxy.bench.scenarios import Scenario, prompt
from loraproxy.bench.wire import StreamJob

_SHORTEST, _LONGEST = 32, 96
"""Tokens of a request."""
_SETTLING = 3.0
"""Seconds from the first token of all to the window. Not of each client: where their adapters differ, llama-server may
serve one for as long as that has requests."""


async def tokens_per_second(port: int, load: Scenario, n_adapters: int, seconds: float) -> float:
    """Tokens that came in a window of ``seconds`` from the server at ``port`` of 127.0.0.1, over its length.

    It has ``n_adapters`` adapters. Raises RuntimeError where a request fails.
    """
    arrivals: list[list[float]] = [[] for _ in range(load.streams)]
    clients = [
        asyncio.create_task(_client(port, client, load, n_adapters, arrivals[client])) for client in range(load.streams)
    ]
    try:
        while not any(arrivals):
            await _go_on(clients, 0.1)
        await _go_on(clients, _SETTLING)
        began = time.perf_counter()
        await _go_on(clients, seconds)
        ended = time.perf_counter()
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return sum(began <= arrival < ended for one in arrivals for arrival in one) / (ended - began)


async def _go_on(clients: Sequence[asyncio.Task[None]], seconds: float) -> None:
    """Let them; raises what one of them ended with, as only an error ends it."""
    ended, _ = await asyncio.wait(clients, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for client in ended:
        client.result()


async def _client(port: int, client: int, load: Scenario, n_adapters: int, arrivals: list[float]) -> None:
    adapter = client % load.adapters if load.adapters else None
    lengths = random.Random(client)
    n_predict = _LONGEST * (client + 1) // load.streams  # so that they do not all come to their second at once
    number = client
    while True:
        body = request_body(StreamJob(prompt=prompt(number), adapter=adapter), n_predict, n_adapters)
        await run_stream("127.0.0.1", port, body, arrivals)
        n_predict = lengths.randint(_SHORTEST, _LONGEST)
        number += load.streams


def mean_with_error(ratios: Sequence[float]) -> str:
    """Their mean, and its standard error where there are several."""
    error = f" ± {stdev(ratios) / len(ratios) ** 0.5:.3f}" if len(ratios) > 1 else ""
    return f"{mean(ratios):.3f}{error} ×"
