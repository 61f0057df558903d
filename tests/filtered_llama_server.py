"""A real llama-server as one from before January 2025 was: a filter takes ``lora`` out of every request.

Programs of that age are not to be had as packages. What else they lacked makes no difference to the proxy.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from servers import Server


@dataclass
class Filter:
    """Where it listens, and the scales that were set through it so far, in order."""

    url: str = ""
    changes: list[list[dict[str, float]]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def without_lora(server: Server) -> AsyncIterator[Filter]:
    """The filter in front of ``server``."""
    state = Filter()

    async def handle(request: web.Request) -> web.StreamResponse:
        data = await request.read()
        if request.path == "/lora-adapters" and request.method == "POST":
            state.changes.append(json.loads(data))
            state.changed.set()
        elif data.startswith(b"{"):
            body = json.loads(data)
            body.pop("lora", None)
            data = json.dumps(body).encode()
        async with session.request(request.method, server.base_url + request.path_qs, data=data or None) as answer:
            if "Content-Length" in answer.headers:
                kind = {"Content-Type": answer.headers["Content-Type"]}
                return web.Response(body=await answer.read(), status=answer.status, headers=kind)
            response = web.StreamResponse(
                status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]}
            )
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0)) as session:
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            state.url = f"http://{host}:{port}"
            yield state
        finally:
            await runner.cleanup()
