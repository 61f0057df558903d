"""Bodies copied as they come, from a server that sends exactly these bytes in exactly these pieces."""

import asyncio
import random
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from standin import soon

from loraproxy.proxy.copying import copy_body, is_one_frame, text_of_frame

EVENT = b'data: {"content": "Arr"}\n\n'
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


def frame(text: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(text), text)


class Way:
    """A client's way over a proxy to a server that is given as ``serve(writer)``."""

    def __init__(self, serve):
        self.serve = serve
        self.seen = []
        self.outcomes = []
        self.cut_off = asyncio.Event()
        """The proxy closed the connection to the server before its answer was whole."""
        self.connections = 0
        self.port = 0

    @asynccontextmanager
    async def open(self):
        async def answer(reader, writer):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"GET ")
            self.connections += 1
            try:
                await self.serve(writer)
            except ConnectionError:
                self.cut_off.set()
            finally:
                writer.close()

        async def handle(request):
            answer = await session.get(f"http://127.0.0.1:{upstream}/")
            response = web.StreamResponse()
            try:
                await response.prepare(request)
                whole = await copy_body(request, answer, response, self.seen.append)
                self.outcomes.append(whole)
                if not whole:
                    await response.write(b"BROKEN")
                await response.write_eof()
            except ConnectionResetError:
                self.outcomes.append("the client is gone")
            finally:
                answer.release()
            return response

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        upstream = server.sockets[0].getsockname()[1]
        app = web.Application()
        app.router.add_get("/", handle)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        try:
            async with aiohttp.ClientSession() as session:
                yield self
        finally:
            await runner.cleanup()
            server.close()
            await server.wait_closed()

    async def get(self) -> bytes:
        async with aiohttp.ClientSession() as client, client.get(f"http://127.0.0.1:{self.port}/") as answer:
            return await answer.read()

    async def raw(self, version: str) -> bytes:
        """What comes over the wire until the connection closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"GET / HTTP/{version}\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        return answer


def in_pieces(*pieces: bytes):
    """Send each by itself: the next when the one before has long arrived."""

    async def serve(writer):
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.005)

    return serve


async def test_a_frame_goes_on_as_it_came(monkeypatch):
    parsed = []
    real = aiohttp.client_proto.ResponseHandler.data_received

    def data_received(self, data):
        parsed.append(data)
        real(self, data)

    monkeypatch.setattr(aiohttp.client_proto.ResponseHandler, "data_received", data_received)
    frames = [frame(EVENT + b"%d" % i) for i in range(6)]
    async with Way(in_pieces(CHUNKED, *frames, b"0\r\n\r\n")).open() as way:
        answer = await way.raw("1.1")
    assert answer.partition(b"\r\n\r\n")[2] == b"".join(frames) + b"0\r\n\r\n"
    assert way.seen == [EVENT + b"%d" % i for i in range(6)]
    assert way.outcomes == [True]
    assert not set(frames[2:]) & set(parsed), "nobody takes apart what goes on as it came"
    assert b"0\r\n\r\n" in parsed


async def test_a_client_without_chunks_gets_the_text():
    async with Way(in_pieces(CHUNKED, *[frame(EVENT)] * 4, b"0\r\n\r\n")).open() as way:
        head, _, body = (await way.raw("1.0")).partition(b"\r\n\r\n")
    assert (b"chunked" in head.lower(), body) == (False, EVENT * 4)


async def test_a_body_that_ends_with_its_connection():
    async with Way(in_pieces(UNTIL_CLOSED, EVENT, EVENT, EVENT)).open() as way:
        assert await way.get() == EVENT * 3
    assert way.outcomes == [True]


LIKE_FRAMES = [
    b"5\r\ndata:\r\n",
    b"data:5\r\ndata:\r\n",
    b"4\r\n4\r\n4\r\n",
    b"0\r\n\r\n",
    b"da\r\ndata:\r\n",
    b"d\r\nata",
]


@pytest.mark.parametrize("seed", range(12))
async def test_however_the_bytes_are_cut_the_body_is_the_same(seed):
    source = random.Random(seed)
    texts = [
        source.choice(
            [EVENT, b"event: a\n", b": still here\n\n", source.choice(LIKE_FRAMES), b"x" * 70, b"data:" * 900]
        )
        for _ in range(40)
    ]
    frames = [frame(text) if source.random() < 0.8 else b"%X;a=b\r\n%b\r\n" % (len(text), text) for text in texts]
    pieces = [CHUNKED]
    for piece in [*frames, b"0\r\n\r\n"]:
        how = source.random()
        if how < 0.6:
            pieces.append(piece)
        elif how < 0.8:
            pieces[-1] += piece  # two at once
        else:
            at = source.randrange(1, len(piece))
            pieces += [piece[:at], piece[at:]]
    async with Way(in_pieces(*pieces)).open() as way:
        assert await way.get() == b"".join(texts)
    assert (way.outcomes, b"".join(way.seen)) == ([True], b"".join(texts))


@pytest.mark.parametrize(
    "end",
    [b"", b"1", b"40\r\ndata: half", frame(EVENT)[:-1], b"nonsense\r\n", b"-5\r\n", b"data:\r\n"],
    ids=["between frames", "in a size", "in a text", "before the last byte", "no size", "negative", "an event"],
)
@pytest.mark.parametrize("before", [1, 4])
async def test_a_body_that_breaks_off_is_not_whole(before, end):
    async with Way(in_pieces(CHUNKED, *[frame(EVENT)] * before, end)).open() as way:
        body = await way.get()
    assert way.outcomes == [False]
    assert body.startswith(EVENT * before)
    assert body.endswith(b"BROKEN")


async def test_a_client_that_goes_away_ends_the_copying():
    async def serve(writer):
        writer.write(CHUNKED)
        while True:
            writer.write(frame(EVENT))
            await writer.drain()
            await asyncio.sleep(0.002)

    async with Way(serve).open() as way:
        reader, writer = await asyncio.open_connection("127.0.0.1", way.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(frame(EVENT) * 3)
        writer.transport.abort()
        await soon(way.cut_off.wait())
    assert way.outcomes == []


async def test_a_slow_client_holds_the_server_back_and_misses_nothing():
    texts = [b"data: %07d" % i + b"x" * 4000 for i in range(8000)]
    sent = 0

    async def serve(writer):
        nonlocal sent
        writer.transport.set_write_buffer_limits(high=1 << 16)
        writer.write(CHUNKED)
        for text in texts:
            writer.write(frame(text))
            await writer.drain()
            sent += len(text)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async with Way(serve).open() as way:
        reader, writer = await asyncio.open_connection("127.0.0.1", way.port)
        writer.write(b"GET / HTTP/1.0\r\nHost: a\r\n\r\n")
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.2)
        seen = sum(map(len, way.seen))
        assert sent < sum(map(len, texts)), "the server should be held back"
        await reader.readuntil(b"\r\n\r\n")
        got = await reader.read()
        writer.close()
    assert got == b"".join(texts)
    assert seen < sum(map(len, texts)) / 2


async def test_a_connection_is_used_for_the_next_answer():
    async def twice(writer):
        for _ in range(2):
            await in_pieces(CHUNKED, *[frame(EVENT)] * 4, b"0\r\n\r\n")(writer)
            await asyncio.wait_for(asked.wait(), 10)

    asked = asyncio.Event()
    async with Way(twice).open() as way:
        assert await way.get() == EVENT * 4
        asked.set()
        assert await way.get() == EVENT * 4
    assert (way.outcomes, way.connections) == ([True, True], 1)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (frame(EVENT), EVENT),
        (frame(b"\r\n"), b"\r\n"),
        (frame(b"x" * 300), b"x" * 300),
        (b"0\r\n\r\n", b""),
        (b"", b""),
        (b"\r\n", b""),
        (b"5\r\n", b""),
        (frame(EVENT) * 2, b""),
        (frame(EVENT)[:-1], b""),
        (frame(EVENT)[1:], b""),
        (b"05\r\ndata:\r\n", b""),
        (b"0x5\r\ndata:\r\n", b""),
        (b"+5\r\ndata:\r\n", b""),
        (b"A\r\ndata: four\r\n", b""),
        (b"5;a=b\r\ndata:\r\n", b""),
        (b"5\ndata:\n", b""),
    ],
)
def test_the_text_of_one_frame(data, text):
    assert text_of_frame(data) == text


@pytest.mark.parametrize(
    ("data", "text", "is_one"),
    [
        (frame(EVENT), EVENT, True),
        (frame(EVENT), frame(EVENT), False),
        (frame(EVENT), b"", False),
        (b"4\r\n4\r\n4\r\n", b"4\r\n4", False),
        (frame(b"other"), b"other", False),
    ],
)
def test_one_frame_is_known_by_its_event(data, text, is_one):
    assert is_one_frame(data, text) == is_one
