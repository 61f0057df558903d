"""``python -m loraproxy.bench.client_process HOST PORT ADAPTERS``: drive a server over HTTP, in a process of its own.

Its requests are the same for the product and for llama-server, and so is its cost.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from loraproxy.bench.wire import Job, StreamJob, StreamTimes, answer_jobs

_LINE_LIMIT = 1 << 22


def request_body(stream: StreamJob, n_predict: int, n_adapters: int) -> bytes:
    """The JSON of ``POST /completion``, understood by llama-server and by the product alike.

    Every adapter of the server has its scale in it: llama-server was seen applying all of them at full scale to
    requests without ``lora``, and to those where it is empty.
    """
    body: dict[str, Any] = {
        "prompt": stream.prompt,
        "n_predict": n_predict,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
    }
    body["lora"] = [{"id": i, "scale": 1.0 if i == stream.adapter else 0.0} for i in range(n_adapters)]
    return json.dumps(body).encode()


async def run_stream(host: str, port: int, body: bytes, seen: list[float] | None = None) -> StreamTimes:
    """Send one request and note when each of its events arrives, in ``seen``, too, as they do.

    Raises RuntimeError when the answer is no stream.
    """
    reader, writer = await asyncio.open_connection(host, port, limit=_LINE_LIMIT)
    try:
        head = (
            f"POST /completion HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        sent = time.perf_counter()
        arrivals: list[float] = []
        last: dict[str, Any] = {}
        async for event in _events(reader):
            last = json.loads(event)
            if "error" in last:
                raise RuntimeError(f"the stream ended with {last['error']}")
            if not last["stop"]:
                arrivals.append(time.perf_counter())
                if seen is not None:
                    seen.append(arrivals[-1])
    finally:
        writer.close()
    if not last.get("stop"):
        raise RuntimeError("the stream broke off")
    return StreamTimes(
        sent=sent, arrivals=tuple(arrivals), n_tokens=last["tokens_predicted"], n_prompt=last["tokens_evaluated"]
    )


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event of a chunked HTTP answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0] or b"chunked" not in head.lower():
        status, body = head.split(b"\r\n", 1)[0], await reader.read(2000)
        raise RuntimeError(f"no stream but {status.decode()}: {body.decode('utf-8', 'replace')}")
    pending = b""
    while size := int(await reader.readline(), 16):
        pending += await reader.readexactly(size)
        await reader.readexactly(2)
        *events, pending = pending.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):  # else it is a comment that keeps the connection alive
                yield event.removeprefix(b"data: ")


async def _main(host: str, port: int, n_adapters: int) -> None:
    async def run(job: Job) -> tuple[StreamTimes, ...]:
        streams = (run_stream(host, port, request_body(stream, job.n_predict, n_adapters)) for stream in job.streams)
        return tuple(await asyncio.gather(*streams))

    await answer_jobs(run)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
