"""A small real HTTP server on a unix socket in the place of the worker, for what a real worker cannot be made to do.

It breaks connections, holds answers back and counts them at the test's command. Everything else about the proxy
is tested with the real worker in tests/integration.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from loraproxy.adapters.fingerprint import fingerprint
from loraproxy.adapters.names import check_name
from loraproxy.adapters.peft_folder import WEIGHTS_FILE
from loraproxy.adapters.registry import AdapterRegistry, Source
from loraproxy.adapters.roots import AllowedRoots
from loraproxy.adapters.tensors import AdapterSummary
from loraproxy.adapters.uploads import UploadFolder
from loraproxy.backends.base import WorkerExit
from loraproxy.config import HttpConfig
from loraproxy.errors import AdapterChanged, ApiError, InvalidAdapterFile, StartFailed
from loraproxy.metrics import Metrics
from loraproxy.pool.backoff import Backoff
from loraproxy.pool.keeper import WorkerLimits
from loraproxy.pool.pool import WorkerPool
from loraproxy.pool.worker import State
from loraproxy.proxy.adapters_api import AdminState
from loraproxy.proxy.app import make_app
from loraproxy.proxy.catalog import Catalog, Surveyed
from loraproxy.proxy.connections import Runner, server_log
from loraproxy.proxy.context import Proxy

PATIENCE = 10
"""Seconds after which a test that waits for a condition fails."""

MODELS = {
    "models": [{"name": "base", "model": "base", "capabilities": ["completion"]}],
    "object": "list",
    "data": [{"id": "base", "object": "model", "aliases": [], "created": 1, "meta": {"n_vocab": 7}}],
}


ADAPTER_BYTES = 1000


def summary(name: str, path: Path, digest: str = "0", nbytes: int = ADAPTER_BYTES) -> AdapterSummary:
    """What a survey would have said of an adapter."""
    return AdapterSummary(
        name=name,
        path=path,
        digest=digest,
        format="gguf",
        size_bytes=nbytes,
        rank=(8, 8),
        targets=("blk.0.attn_q.weight",),
        resident_bytes=nbytes,
    )


def _refusal(path: Path, digest: str) -> ApiError | None:
    """Why the worker does not load an adapter, as the content of its file says."""
    content = path.read_text() if path.exists() else digest
    if content.startswith("worker refuses"):
        return InvalidAdapterFile("the graph has no such place")
    return None if content == digest else AdapterChanged("the file changed")


class PathChecks:
    """In the place of :class:`loraproxy.proxy.catalog.Checks`: a file's content is its digest.

    A file that starts with ``bad`` cannot be applied.
    """

    base_names = frozenset({"base"})

    def name(self, name: str) -> str:
        return check_name(name)

    def survey_or_reason(self, name: str, path: Path) -> Surveyed:
        seen = fingerprint(path)
        file = path / WEIGHTS_FILE if path.is_dir() else path
        content = file.read_text() if file.exists() else "bad: no such file"
        if content.startswith("bad"):
            return Surveyed(f"adapter {name!r} ({path}): {content}", seen)
        return Surveyed(summary(name, path, content), seen)

    def check_upload(self, name: str) -> None:
        pass

    def read(self, name: str, path: Path) -> AdapterSummary:
        found = self.survey_or_reason(name, path)
        if isinstance(found.content, str):
            raise InvalidAdapterFile(found.content)
        return found.content


async def soon(awaitable: Any) -> Any:
    """Await something that must happen."""
    return await asyncio.wait_for(awaitable, PATIENCE)


class StandIn:
    """A backend for the pool; one instance is one start of the worker."""

    base_url = "http://worker"

    def __init__(self, socket: Path, may_start: asyncio.Event, fails_to_start: bool = False) -> None:
        self.socket = socket
        self.may_start = may_start
        self.fails_to_start = fails_to_start
        self.started = asyncio.Event()
        self.stopped = asyncio.Event()
        self.received: list[tuple[str, bytes]] = []
        self.ids: list[str] = []
        """The X-Request-Id of each request that was received."""
        self.connections: set[asyncio.Transport] = set()
        self.arrived = asyncio.Semaphore(0)
        self.cancelled = asyncio.Event()
        self.go_on = asyncio.Semaphore(0)
        """Each release lets one event of a held stream, or one held answer, go out."""
        self.loaded: list[int] = []
        """Wire ids of the adapters that are loaded."""
        self.loads = 0
        self.hold_loads = False
        self.go_on_loading = asyncio.Semaphore(0)
        self.grace: float | None = None
        self._died = asyncio.Event()

    async def start(self) -> None:
        await self.may_start.wait()
        if self.fails_to_start:
            raise StartFailed("the worker ended while it was starting: exit code 1: no memory")
        app = web.Application(client_max_size=0)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.socket)).start()
        self.session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(self.socket), limit=0))
        self.started.set()

    async def wait(self) -> WorkerExit:
        await self._died.wait()
        return WorkerExit(-9, ("last words",))

    async def stop(self, grace: float) -> None:
        self.grace = grace
        if self.started.is_set():
            self._abort()
            await self._runner.cleanup()
            await self.session.close()
            self.socket.unlink(missing_ok=True)
        self.stopped.set()

    def die(self) -> None:
        """Break every connection, as a killed process does."""
        self._abort()
        self._died.set()

    def _abort(self) -> None:
        for transport in self.connections:
            transport.abort()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self.connections.add(request.transport)
        body = await request.read()
        if request.path.startswith("/internal/adapters"):
            return await self._adapter(request, body)
        self.received.append((request.path_qs, body))
        self.ids.append(request.headers.get("X-Request-Id", ""))
        self.arrived.release()
        if request.path.endswith("models"):
            return web.json_response(MODELS)
        if request.path == "/metrics":
            return web.Response(text="llamacpp:n_decode_total 1\n")
        wish = json.loads(body).get("wish", "echo") if body else "echo"
        if wish == "stream":
            return await self._stream(request)
        if wish == "hold":
            await self._held()
        if wish == "refuse":
            error = {"code": 400, "message": "no", "type": "invalid_request_error"}
            return web.json_response({"error": error}, status=400)
        return web.json_response({"path": request.path_qs, "body": body.decode()})

    async def _adapter(self, request: web.Request, body: bytes) -> web.Response:
        """Load or unload. A file whose content is not the registered digest has changed."""
        if request.method == "DELETE":
            if not request.path.endswith("/prompts"):
                self.loaded.remove(int(request.path.rpartition("/")[2]))
            return web.json_response({})
        item = json.loads(body)
        if self.hold_loads:
            await self.go_on_loading.acquire()
        error = _refusal(Path(item["path"]), item["digest"])
        if error is not None:
            return web.json_response(error.body(), status=error.status)
        self.loaded.append(item["id"])
        self.loads += 1
        return web.json_response({"bytes": ADAPTER_BYTES})

    async def _held(self) -> None:
        try:
            await self.go_on.acquire()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        await response.prepare(request)
        for number in range(3):
            await self._held()
            await response.write(b'data: {"content":"%d"}\n\n' % number)
        await response.write_eof()
        return response


class Bench:
    """A proxy on a real port, in front of stand-ins."""

    two_fit = True
    """There is memory for a second worker while one is drained."""

    def __init__(
        self, folder: Path, http: HttpConfig, keys: tuple[str, ...], slots: int, strict: bool, memory: int
    ) -> None:
        self.workers: list[StandIn] = []
        self.broken_starts = 0
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.made = asyncio.Semaphore(0)
        """Released for every replacement of the first worker."""
        self.registry = AdapterRegistry()
        for name in ("pirate", "robot"):
            self.registry.put(name, folder / name, summary(name, folder / name), source=Source.CONFIGURED)
        self._folder = folder
        metrics = Metrics(lambda: self.pool.in_flight, lambda: self.pool.restarts)
        self.pool = self._make_pool(metrics, slots, http.max_queue, memory)
        metrics.watch_workers(tuple(state.value for state in State), lambda: self.pool.states())
        metrics.watch_adapters(
            lambda: len(self.registry), lambda: self.pool.residency.nbytes, lambda: self.pool.residency.waiting
        )
        checks: Any = PathChecks()
        self.catalog = Catalog(self.registry, self.pool, checks, UploadFolder(folder / "uploads"))
        proxy = Proxy(self.catalog, self.pool, metrics, frozenset({"base"}), strict)
        self.admin = AdminState(self.catalog, AllowedRoots([folder / "root"]), 10_000, {})
        app = make_app(proxy, http, keys, self.admin)
        self.runner = Runner(app, handler_cancellation=True, shutdown_timeout=0, logger=server_log())

    def _make_pool(self, metrics: Metrics, slots: int, max_queue: int, memory: int) -> Any:
        return WorkerPool(
            self._make,
            metrics,
            slots=slots,
            max_queue=max_queue,
            limits=WorkerLimits(memory, two_fit=self.two_fit),
            backoff=Backoff(first=0.02, longest=0.1),
        )

    @property
    def worker(self) -> StandIn:
        """The newest stand-in."""
        return self.workers[-1]

    def _make(self) -> StandIn:
        fails = self.broken_starts > 0
        self.broken_starts -= fails
        self.workers.append(StandIn(self._folder / f"{len(self.workers)}.sock", self.may_start, fails))
        if len(self.workers) > 1:
            self.made.release()
        return self.workers[-1]

    def post(self, path: str, body: Any, **more: Any) -> Any:
        """A POST with a JSON body, or with ``body`` itself where it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.post(self.url + path, data=data, **more)

    def get(self, path: str, **more: Any) -> Any:
        return self.client.get(self.url + path, **more)


@asynccontextmanager
async def running(
    folder: Path,
    http: HttpConfig | None = None,
    *,
    keys: tuple[str, ...] = (),
    slots: int = 4,
    strict: bool = False,
    memory: int = 0,
    started: bool = True,
    make: type[Bench] = Bench,
) -> AsyncIterator[Any]:
    """A proxy whose worker has started, unless ``started`` is false."""
    bench = make(folder, http or HttpConfig(), keys, slots=slots, strict=strict, memory=memory)
    await bench.runner.setup()
    await web.TCPSite(bench.runner, "127.0.0.1", 0).start()
    bench.url = f"http://127.0.0.1:{bench.runner.addresses[0][1]}"
    bench.client = aiohttp.ClientSession()
    if started:
        await bench.pool.start()
    try:
        yield bench
    finally:
        await bench.client.close()
        if started:
            await bench.pool.close(0)
        await bench.catalog.close()
        await bench.runner.cleanup()
