"""Copying the body of an answer as it comes: the work that each token of each stream costs, so there is little of it.

Read and written the usual way, every chunk wakes a task in the loop's next turn and is taken apart and put together
again, which is most of what a token takes. Here a chunk is written in the turn that received it, and one that came as
a frame of its own goes on as the bytes it came in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp
from aiohttp import web

_MOST_UNSENT = 1 << 16
"""Bytes that may wait for a slow client before its stream is read no further."""
_FRAME_HEAD = 18
"""The size of a chunk in hexadecimal digits, and the end of its line."""
_NO_SIZE_LINE = (b"data:", b"event:")
"""What events begin with: ``t`` and ``v`` are no digits."""


async def copy_body(
    request: web.Request,
    answer: aiohttp.ClientResponse,
    response: web.StreamResponse,
    look: Callable[[bytes], None],
) -> bool:
    """Write the body of ``answer`` to ``response``, the prepared answer to ``request``; ``look`` is shown all of it.

    False: the server broke it off. Raises ConnectionResetError when the client is gone.
    """
    connection, client = answer.connection, request.transport
    if client is None:
        raise ConnectionResetError
    server = connection.transport if connection is not None else None
    if server is None:  # all of it has come
        return await _Copying(asyncio.Protocol(), answer.content, client, look, lost=True).into(response)
    protocol = server.get_protocol()
    assert isinstance(protocol, asyncio.Protocol)
    copying = _Copying(protocol, answer.content, client, look)
    server.set_protocol(copying)
    try:
        return await copying.into(response)
    finally:
        if server.get_protocol() is copying:
            server.set_protocol(protocol)


class _Copying(asyncio.Protocol):
    """Takes the place of aiohttp's ``protocol`` at a connection to a server, and gives it what it receives.

    What that makes of it, the ``content``, is written to the ``client`` at once while that keeps up. Frames of chunked
    bodies that came whole pass it by: it is then where it was before them, at the start of one.
    """

    def __init__(
        self,
        protocol: asyncio.Protocol,
        content: aiohttp.StreamReader,
        client: asyncio.Transport,
        look: Callable[[bytes], None],
        lost: bool = False,
    ) -> None:
        self._protocol, self._content, self._client, self._look = protocol, content, client, look
        self._lost = lost
        self._at_once = False
        """Whether what comes is written as it comes; else :meth:`into` is woken to do it."""
        self._chunked = False
        """Whether the client gets frames."""
        self._between_frames = False
        """Whether aiohttp's parser is known to be at the start of a frame."""
        self._news = asyncio.get_running_loop().create_future()

    async def into(self, response: web.StreamResponse) -> bool:
        """Copy all of it; False where the server broke it off. Raises ConnectionResetError when the client is gone."""
        content, client = self._content, self._client
        self._chunked = response.headers.get("Transfer-Encoding") == "chunked"
        begun = False
        while content.exception() is None:
            while text := content.read_nowait():
                self._look(text)
                await response.write(text)
                begun = True  # the headers, which wait for the first bytes, are sent
            if content.at_eof():
                return True
            if client.is_closing():
                raise ConnectionResetError
            if self._lost:
                return False
            self._news = asyncio.get_running_loop().create_future()
            self._at_once = begun and not client.get_write_buffer_size()
            await self._news
            self._at_once = False
        return False

    def data_received(self, data: bytes) -> None:
        client = self._client
        if not self._at_once or client.is_closing():
            self._parse(data)
            self._wake()
            return
        if self._between_frames and (text := text_of_frame(data)):
            self._look(text)
            client.write(data if self._chunked else text)
        else:
            self._parse_and_write(data)
        self._at_once = client.get_write_buffer_size() <= _MOST_UNSENT

    def _parse(self, data: bytes) -> None:
        """Let aiohttp's protocol make content of ``data``."""
        self._between_frames = False
        self._protocol.data_received(data)

    def _parse_and_write(self, data: bytes) -> None:
        self._parse(data)
        content, text = self._content, b""
        while content.exception() is None and (more := content.read_nowait()):  # reading has it parse what it held back
            text = more
            self._look(text)
            self._client.write(b"%x\r\n%b\r\n" % (len(text), text) if self._chunked else text)
        self._between_frames = is_one_frame(data, text)
        if content.exception() is not None or content.at_eof():
            self._wake()

    def _wake(self) -> None:
        if not self._news.done():
            self._news.set_result(None)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._protocol.connection_lost(exc)
        self._wake()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()


def text_of_frame(data: bytes) -> bytes:
    """The text of the one frame of a chunked body (RFC 9112, 7.1) that ``data`` is; empty where it is anything else."""
    head = data[: data.find(b"\r\n", 0, _FRAME_HEAD) + 2]
    text = data[len(head) : -2]
    return text if data.endswith(b"\r\n") and head == b"%x\r\n" % len(text) else b""


def is_one_frame(data: bytes, text: bytes) -> bool:
    """Whether a parser that made ``text`` of ``data`` is at the start of a frame now, as it was before.

    Within a size line or a text it would have taken the digits that ``data`` begins with for something else, and
    then either given other text or failed, as an event does not begin with a size.
    """
    return text.startswith(_NO_SIZE_LINE) and text_of_frame(data) == text
