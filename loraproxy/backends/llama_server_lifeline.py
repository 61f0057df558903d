"""A connection that is kept open to a llama-server, so that its end, and a restart, is noticed at once.

A server that was started again with its adapters in another order has other ids for them. Whoever went on with the
old ones would be answered under the wrong adapters, in silence. The operating system closes a process's connections
when it ends, so the connection is lost before a new server can listen at the same place.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from yarl import URL

_CONNECT_SECONDS = 3.0
"""A server that is there takes a connection at once; where nothing answers at all the system would try for minutes."""
_PING_SECONDS = 2.0
"""llama-server closes connections that were idle for five seconds."""
_PATIENCE = 60.0
"""Seconds without an answer after which the connection counts as lost."""
_LOST = (OSError, EOFError, LookupError, ValueError, asyncio.LimitOverrunError, asyncio.TimeoutError)


@asynccontextmanager
async def lifeline(url: URL) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Connect to the server at ``url``; what is yielded returns when the connection is lost. Raises OSError."""
    context = ssl.create_default_context() if url.scheme == "https" else None
    connecting = asyncio.open_connection(url.host, url.port, ssl=context)
    try:
        reader, writer = await asyncio.wait_for(connecting, _CONNECT_SECONDS)
    except asyncio.TimeoutError as error:  # no OSError before Python 3.11
        raise TimeoutError(errno.ETIMEDOUT, "it does not answer") from error

    async def until_lost() -> None:
        first = True
        with suppress(*_LOST):
            while await asyncio.wait_for(_is_kept_and_healthy(url, reader, writer), _PATIENCE):
                await _idle(reader)
                first = False
            if first:  # something between us and the server keeps no connections: have a look now and then
                await asyncio.sleep(_PING_SECONDS)

    try:
        yield until_lost
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _is_kept_and_healthy(url: URL, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Ask once; whether the answer is good and not the connection's last."""
    path = f"{url.raw_path.rstrip('/')}/health"
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {url.host}:{url.port}\r\n\r\n".encode())
    await writer.drain()
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines if ": " in line)
    if "content-length" not in headers or headers.get("connection") == "close":
        return False
    await reader.readexactly(int(headers["content-length"]))
    return " 200" in status


async def _idle(reader: asyncio.StreamReader) -> None:
    """Return after a while. Raises EOFError when the connection ends."""
    try:
        data = await asyncio.wait_for(reader.read(1), _PING_SECONDS)
    except asyncio.TimeoutError:
        return
    raise EOFError("closed" if not data else "an answer to no question")
