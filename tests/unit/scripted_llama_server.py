"""A small real HTTP server in the place of a llama-server, for what a real one cannot be made to do at will.

It breaks connections, holds answers back and ends at the test's command; a test may have several, with different
adapters. Everything else is tested with the real program in tests/peers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from loraproxy.adapters.registry import AdapterRegistry
from loraproxy.adapters.roots import AllowedRoots
from loraproxy.adapters.uploads import UploadFolder
from loraproxy.backends.llama_server import Retry, UrlServers
from loraproxy.config import Config, HttpConfig
from loraproxy.metrics import Metrics
from loraproxy.pool.pool import WorkerPool
from loraproxy.proxy.adapters_api import AdminState
from loraproxy.proxy.app import make_app
from loraproxy.proxy.catalog import Catalog
from loraproxy.proxy.connections import server_log
from loraproxy.proxy.context import Proxy
from loraproxy.proxy.passthrough import Passthrough
from loraproxy.proxy.served import ServedAdapters, look

RETRY = Retry(first=0.01, longest=0.02, loading=0.01, start=0.0)


class Scripted:
    """One server; ``files`` are the adapters that it was started with."""

    def __init__(self, files: Sequence[str], *, per_request: bool = True, key: str = "") -> None:
        self.files = list(files)
        self.per_request = per_request
        self.key = key
        self.scales = [1.0] * len(self.files)
        self.received: list[tuple[str, str, dict[str, str], bytes]] = []
        self.connections: set[asyncio.Transport] = set()
        self.go_on = asyncio.Semaphore(0)
        self.arrived = asyncio.Semaphore(0)
        self.loading = False
        self.drops_idle = False
        """It closes connections that were used once, when they are used again."""
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen; after a ``stop`` at the same port."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """As when the process is killed."""
        self.break_connections()
        await self._runner.cleanup()

    def break_connections(self) -> None:
        for transport in self.connections:
            transport.abort()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        if self.drops_idle and request.path != "/health" and request.transport in self.connections:
            request.transport.abort()
        self.connections.add(request.transport)
        data = await request.read()
        if request.path == "/health":
            return web.json_response({"status": "ok"}, status=503 if self.loading else 200)
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "Invalid API Key"}}, status=401)
        if request.path == "/lora-adapters":
            if request.method == "POST":
                self.scales = [entry["scale"] for entry in json.loads(data)]
                return web.json_response({"success": True})
            listed = [{"id": i, "path": f, "scale": self.scales[i]} for i, f in enumerate(self.files)]
            return web.json_response(listed)
        if request.path == "/v1/models":
            return web.json_response({"models": [{"name": "base"}], "data": [{"id": "/m/base.gguf"}]})
        if request.path == "/props":
            return web.json_response({"total_slots": 2})
        body = json.loads(data) if data.startswith(b"{") else {}
        if body.get("lora") == "no list":
            if self.per_request:
                return web.json_response({"error": {"message": "'lora' must be an array"}}, status=400)
            return web.json_response({"content": "x"})
        self.received.append((request.method, request.raw_path, dict(request.headers), data))
        self.arrived.release()
        return await self._as_wished(request, body)

    async def _as_wished(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path == "/hello":
            return web.Response(body=b"\x00hi\n", status=418, headers={"X-Own": "1", "Content-Type": "a/b"})
        wish = body.get("wish")
        if wish is None:
            return web.json_response({"scales": self.scales})
        if wish == "hold":
            await self.go_on.acquire()
            return web.json_response({})
        kind = "text/event-stream" if wish == "stream" else "application/x-other"
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        for number in range(3):
            await response.write(b"data: %d\n\n" % number)
            await self.go_on.acquire()
        return response


class Front:
    """The proxy in front of scripted servers."""

    def __init__(self, url: str, client: aiohttp.ClientSession, backend: UrlServers, catalog: Catalog) -> None:
        self.url = url
        self.client = client
        self.backend = backend
        self.catalog = catalog

    def request(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        """A request with a JSON body, or with ``body`` itself where it is bytes."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.request(method, URL(self.url + path, encoded=True), data=data, **more)


@asynccontextmanager
async def in_front_of(
    folder: Path, *servers: Scripted, keys: tuple[str, ...] = (), api_key: str = ""
) -> AsyncIterator[Front]:
    """The proxy, started, in front of ``servers``, which are started too unless they have a port already."""
    async with AsyncExitStack() as stack:
        for server in servers:
            if not server.port:
                await server.start()
                stack.push_async_callback(server.stop)
        urls = [server.url for server in servers]
        served, names = await look(urls, api_key)
        registry = AdapterRegistry()
        adapters = ServedAdapters(urls, names, served)
        adapters.register(registry, Config())
        backend = UrlServers(urls, api_key, on_adapters=adapters.update, retry=RETRY)
        metrics = Metrics(lambda: pool.in_flight, lambda: pool.restarts)
        pool = WorkerPool(lambda: backend, metrics, slots=4, max_queue=16)
        catalog = Catalog(registry, pool, adapters, UploadFolder(folder / "uploads"))
        proxy = Proxy(catalog, pool, metrics, names, False)
        admin = AdminState(catalog, AllowedRoots([folder]), 10_000, {})
        app = make_app(proxy, HttpConfig(), keys, admin, Passthrough(keep_key=not keys))
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0, logger=server_log())
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        await pool.start()
        stack.push_async_callback(pool.close, 0)
        follower = asyncio.create_task(adapters.follow(catalog))
        stack.callback(follower.cancel)
        client = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        yield Front(f"http://127.0.0.1:{runner.addresses[0][1]}", client, backend, catalog)
