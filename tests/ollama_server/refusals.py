"""How requests are refused: ``{"error": "..."}`` and a status."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Refusal(Exception):
    """A refusal; within a stream it becomes a line, before it an answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    def body(self) -> bytes:
        """The error as JSON."""
        return json.dumps({"error": self.message}).encode()


@web.middleware
async def refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refusals as answers; paths and methods that do not exist as the gin framework answers them."""
    try:
        return await handler(request)
    except Refusal as refusal:
        return web.Response(
            status=refusal.status, body=refusal.body(), content_type="application/json", charset="utf-8"
        )
    except web.HTTPNotFound:
        return web.Response(status=404, text="404 page not found")
    except web.HTTPMethodNotAllowed as error:
        return web.Response(status=405, text="405 method not allowed", headers={"Allow": error.headers["Allow"]})
