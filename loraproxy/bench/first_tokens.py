"""What a way to a server adds to the first token, measured in pairs under a steady load.

Requests that all start at once show it badly: which of them share llama-server's next batch is a matter of chance, and
that chance weighs more than the way. Here clients stream all the time, and now and then the same request goes both
ways at once: what the server and the machine do falls on both of a pair. Most pairs share a batch, and differ by what
the answer takes on its way back; one whose second request comes too late for the first's batch differs by a whole
step, as often as the way there makes it late. So the mean over the pairs is what the way costs, and their median what
the most requests notice of it.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import numpy as np

from loraproxy.bench.client_process import request_body, run_stream
from loraproxy.bench.wire import StreamJob

_PAUSE = 0.1
"""At most so many seconds, at random, between two pairs: without it they would come right after the server's steps."""
_WARM_UP = 1.0
"""Seconds that the others stream before the first pair."""
_PAIR, _STREAM = 2, 64
"""Tokens that the requests of a pair and the others generate."""


@dataclass(frozen=True)
class Added:
    """Milliseconds from sending a request to its first token, of the pairs' requests on the two ways."""

    direct_p50: float
    proxied_p50: float
    mean: float
    """Of the pairs' differences."""
    error: float
    """The mean's standard error."""
    median: float
    """Of the pairs' differences."""

    @property
    def p50(self) -> float:
        """How much later the median comes."""
        return self.proxied_p50 - self.direct_p50


def added(direct: list[float], proxied: list[float]) -> Added:
    """From seconds of each pair, in the same order."""
    one, other = 1e3 * np.asarray(direct), 1e3 * np.asarray(proxied)
    differences = other - one
    return Added(
        direct_p50=float(np.median(one)),
        proxied_p50=float(np.median(other)),
        mean=float(differences.mean()),
        error=float(differences.std() / differences.size**0.5),
        median=float(np.median(differences)),
    )


async def measure(direct: int, proxied: int, clients: int, pairs: int, n_adapters: int) -> Added:
    """``direct`` and ``proxied``: ports of 127.0.0.1 that lead to one server, which has a slot for each client.

    It has ``n_adapters`` adapters, which no request uses.

    Two of the ``clients`` are a pair's; the others stream through the proxy. Raises RuntimeError where a request fails.
    """
    source = random.Random(0)
    others = [asyncio.create_task(_stream(proxied, number, n_adapters)) for number in range(clients - 2)]
    times: dict[int, list[float]] = {direct: [], proxied: []}
    try:
        await asyncio.sleep(_WARM_UP)
        for number in range(pairs):
            await asyncio.sleep(source.uniform(0, _PAUSE))
            ports = source.sample([direct, proxied], 2)  # the first is sent a moment before the second
            body = request_body(StreamJob(prompt=f"Pair {number} has a tale:"), _PAIR, n_adapters)
            streams = await asyncio.gather(*(run_stream("127.0.0.1", port, body) for port in ports))
            for port, stream in zip(ports, streams, strict=True):
                times[port].append(stream.arrivals[0] - stream.sent)
            for other in others:
                if other.done():
                    other.result()  # it ends by an error alone
    finally:
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    return added(times[direct], times[proxied])


async def _stream(port: int, client: int, n_adapters: int) -> None:
    number = 0
    while True:
        number += 1
        story = StreamJob(prompt=f"Client {client} has a story, number {number}:")
        await run_stream("127.0.0.1", port, request_body(story, _STREAM, n_adapters))
