"""Running the generations of one request and sending their events, streamed or as one answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Protocol

from aiohttp import web

from loraproxy.errors import ApiError, ServerError
from loraproxy.worker.answers import Answer, Job, Part, Result, dumps, sse_error
from loraproxy.worker.types import Done, Event, Generation, Progress, Timings, Token, TokenProbs

logger = logging.getLogger(__name__)

STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
JSON_TYPE = "application/json; charset=utf-8"
PING_SECONDS = 30.0
"""A stream that is silent for this long gets an SSE comment, so that clients do not give up on it."""


class Generator(Protocol):
    """The part of the engine that completions need."""

    def generate(self, generation: Generation) -> AsyncIterator[Event]:
        """The events of one generation; leaving the iterator early cancels it."""


async def _events(engine: Generator, generation: Generation) -> AsyncGenerator[Event, None]:
    """The events of ``generation``, closed with this iterator. An empty prompt is answered with nothing."""
    if not generation.prompt:
        yield Done("", "none", "", Timings(0, 0, 0.0, 0, 0.0), False, False, 0)
        return
    source = engine.generate(generation)
    try:
        async for event in source:
            yield event
    finally:
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()


async def _merged(engine: Generator, generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of all generations as they come, each with the index of its generation.

    The first error of any of them ends all.
    """
    if len(generations) == 1:
        async with aclosing(_events(engine, generations[0])) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue()

    async def pump(index: int, generation: Generation) -> None:
        try:
            async with aclosing(_events(engine, generation)) as events:
                async for event in events:
                    queue.put_nowait((index, event))
            queue.put_nowait((index, None))
        except Exception as error:  # handed to the reader, who raises it
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(pump(index, generation)) for index, generation in enumerate(generations)]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run(request: web.Request, engine: Generator, job: Job) -> web.StreamResponse:
    """Answer a completion request. Errors before the first event are raised, so that they have their own status."""
    if job.params.stream:
        return await _stream(request, engine, job)
    results = await collect(engine, job.generations)
    return web.Response(body=dumps(job.answer.whole(results)), headers={"Content-Type": JSON_TYPE})


async def collect(engine: Generator, generations: Sequence[Generation]) -> list[Result]:
    """Run ``generations`` to their ends. Raises the first ApiError of any of them."""
    texts: list[list[str]] = [[] for _ in generations]
    tokens: list[list[int]] = [[] for _ in generations]
    probs: list[list[TokenProbs]] = [[] for _ in generations]
    ends: dict[int, Done] = {}
    async with aclosing(_merged(engine, generations)) as events:
        async for index, event in events:
            if isinstance(event, Token):
                texts[index].append(event.text)
                tokens[index].append(event.id)
                if event.probs is not None:
                    probs[index].append(event.probs)
            elif isinstance(event, Done):
                texts[index].append(event.text)
                ends[index] = event
    return [
        Result(index, generation, ends[index], "".join(texts[index]), tokens[index], probs[index])
        for index, generation in enumerate(generations)
    ]


def _shown(answer: Answer, index: int, generation: Generation, event: Event) -> bytes:
    """``event`` as server-sent events."""
    if isinstance(event, Token):
        return answer.part(index, Part.of_token(event))
    if isinstance(event, Progress):
        return answer.part(index, Part.of_progress(event))
    rest = answer.part(index, Part.of_rest(event)) if event.text else b""
    return rest + answer.finish(index, generation, event)


class _Pings:
    """Sends an SSE comment whenever a stream has been silent for ``PING_SECONDS``: one timer a stream."""

    def __init__(self, response: web.StreamResponse) -> None:
        self._response = response
        self._loop = asyncio.get_running_loop()
        self.last = self._loop.time()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            silent = self._loop.time() - self.last
            if silent >= PING_SECONDS:
                await self._response.write(b":\n\n")
                self.last = self._loop.time()
                silent = 0.0
            await asyncio.sleep(PING_SECONDS - silent)

    async def close(self) -> None:
        """End the timer."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def _stream(request: web.Request, engine: Generator, job: Job) -> web.StreamResponse:
    answer, generations = job.answer, job.generations
    async with aclosing(_merged(engine, generations)) as events:
        index, event = await anext(events)
        response = web.StreamResponse(headers=STREAM_HEADERS)
        await response.prepare(request)
        pings = _Pings(response)
        try:
            await response.write(_shown(answer, index, generations[index], event))
            async for index, event in events:
                data = _shown(answer, index, generations[index], event)
                if data:
                    await response.write(data)
                    pings.last = asyncio.get_running_loop().time()
            await response.write_eof(answer.end)
        except ConnectionError:
            logger.debug("event=client_gone path=%s", request.path)
        except ApiError as error:
            await response.write_eof(sse_error(error))
        except Exception:
            logger.exception("event=stream_failed path=%s", request.path)
            await response.write_eof(sse_error(ServerError("the generation failed; see the worker's log")))
        finally:
            await pings.close()
    return response
