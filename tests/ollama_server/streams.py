"""Answers that are streamed as lines of JSON, or put together where ``stream`` is false."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from aiohttp import web

from .refusals import Refusal

Events = AsyncGenerator[dict[str, Any], None]


async def answer(request: web.Request, events: Events, stream: bool, text: tuple[str, ...] = ()) -> web.StreamResponse:
    """Send ``events``. Not streamed: the last of them, with the texts at the path ``text`` of all of them joined.

    A refusal that comes first has its status; one that comes later is a line of the stream.
    """
    async with aclosing(events):
        if not stream:
            whole: dict[str, Any] = {}
            texts: list[str] = []
            async for event in events:
                whole = event
                if text:
                    texts.append(_at(event, text[:-1])[text[-1]])
            if text:
                _at(whole, text[:-1])[text[-1]] = "".join(texts)
            return web.json_response(whole)
        first = await anext(events)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        try:
            await response.write(_line(first))
            async for event in events:
                await response.write(_line(event))
        except Refusal as refusal:
            await response.write(refusal.body() + b"\n")
        except ConnectionResetError:
            return response
        await response.write_eof()
        return response


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


def _at(event: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for key in path:
        event = event[key]
    return event
