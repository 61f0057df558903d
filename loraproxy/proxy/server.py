"""The proxy's life: check the adapters, listen, start the worker, serve, drain, stop."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.folder import Listing
from loraproxy.adapters.read import Unsupported
from loraproxy.adapters.registry import AdapterRegistry
from loraproxy.adapters.uploads import UploadFolder, default_upload_folder
from loraproxy.backends.base import Backend
from loraproxy.backends.embedded import EmbeddedWorker
from loraproxy.config import Config, HttpConfig, WorkerSettings
from loraproxy.errors import ApiError, StartFailed
from loraproxy.metrics import Metrics
from loraproxy.pool.base import Pool
from loraproxy.pool.keeper import WorkerLimits
from loraproxy.pool.pool import WorkerPool
from loraproxy.pool.worker import State
from loraproxy.proxy import fronting, ollama_fronting
from loraproxy.proxy.adapters_api import AdminState
from loraproxy.proxy.app import make_app
from loraproxy.proxy.catalog import AdapterChecks, Catalog, Checks
from loraproxy.proxy.connections import Runner, raise_open_files_limit, server_log
from loraproxy.proxy.context import Proxy
from loraproxy.proxy.keyed_workers import graph_workers, keyed_pool, shares_pages, two_fit
from loraproxy.proxy.loading import allowed_roots, register_configured, register_folder, register_uploads
from loraproxy.proxy.middleware import api_keys
from loraproxy.proxy.passthrough import Passthrough
from loraproxy.proxy.preload import check_names, loaded_first
from loraproxy.proxy.served import ServedAdapters
from loraproxy.proxy.watching import Follower, Watcher

log = logging.getLogger(__name__)

_WORKER_GRACE = 10.0
"""Seconds from SIGTERM to SIGKILL for a worker that has nothing left to do."""


@dataclass(frozen=True)
class _Server:
    """What is laid out before anything listens."""

    proxy: Proxy
    admin: AdminState
    watcher: Watcher | None
    served: ServedAdapters | None = None
    """Where llama-servers at URLs say which adapters there are."""
    preload: tuple[str, ...] = ()
    """What is there before the first request, by name."""


def run(config: Config, announce: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code 0.

    ``announce`` is called with the server's URL when it is ready. Raises StartFailed.
    """
    server = _prepare(config)
    keys = api_keys(config.http)
    if not keys and not _is_local(config.http.host):
        log.warning("listening on %s without an API key: whoever reaches it can use it (--api-key)", config.http.host)
    raise_open_files_limit()
    asyncio.run(_serve(config, server, keys, announce))
    return 0


def _prepare(config: Config) -> _Server:
    """What needs no event loop: check the adapter files, and lay out the worker's settings. Raises StartFailed."""
    if config.backend.kind == "ollama":
        return _prepare_for_ollama(config)
    if config.backend.urls:
        return _prepare_for_urls(config)
    assert config.model is not None
    model = config.model.absolute()
    if not model.is_file():
        raise StartFailed(f"the model file {model} {'is not a regular file' if model.exists() else 'does not exist'}")
    checks = _checks(config, model)
    registry = AdapterRegistry()
    uploads = UploadFolder(
        config.upload_dir.absolute() if config.upload_dir else default_upload_folder(model, config.http.address)
    )
    register_configured(config, registry, checks)
    listing = register_folder(config, registry, checks)
    register_uploads(uploads, registry, checks)
    if config.backend.bin is not None:
        servers = fronting.spawned(config, model, registry)
        return _assemble(
            config, registry, checks, uploads, listing, _shared(config, servers, two_fit=shares_pages(config.engine))
        )
    settings = _worker_settings(config, model)
    if config.engine.lora_mode == "graph":
        kind = graph_workers(config, settings, checks.base)

        def make_pool(metrics: Metrics) -> Pool:
            return keyed_pool(config, kind, registry, metrics)

        return _assemble(config, registry, checks, uploads, listing, make_pool)
    room = two_fit(config, settings, checks.base)
    shared = _shared(config, lambda: EmbeddedWorker(settings), two_fit=room)
    return _assemble(config, registry, checks, uploads, listing, shared)


def _prepare_for_urls(config: Config) -> _Server:
    """Likewise where llama-servers run already: they say which adapters there are. Raises StartFailed."""
    registry = AdapterRegistry()
    served, make_backend = fronting.at_urls(config, registry)
    # servers that run already cannot be given files: every upload is refused before anything is written there
    uploads = UploadFolder(config.upload_dir or Path(tempfile.gettempdir(), f"loraproxy-uploads-{os.getpid()}"))
    server = _assemble(config, registry, served, uploads, Listing(), _shared(config, make_backend))
    return replace(server, served=served)


def _prepare_for_ollama(config: Config) -> _Server:
    """Likewise where an Ollama server has the base model. Raises StartFailed."""
    layout = ollama_fronting.at_url(config)
    registry = AdapterRegistry()
    uploads = UploadFolder(config.upload_dir.absolute() if config.upload_dir else layout.upload_folder)
    register_configured(config, registry, layout.checks)
    listing = register_folder(config, registry, layout.checks)
    register_uploads(uploads, registry, layout.checks)
    # adapters are in that server's memory, and only when they are used: it sees to its budget itself
    unlimited = config.model_copy(update={"adapter_memory": 0})
    return _assemble(unlimited, registry, layout.checks, uploads, listing, _shared(unlimited, layout.make_backend))


def _assemble(
    config: Config,
    registry: AdapterRegistry,
    checks: AdapterChecks,
    uploads: UploadFolder,
    listing: Listing,
    make_pool: Callable[[Metrics], Pool],
) -> _Server:
    """Raises StartFailed for a ``--preload`` that nothing has."""
    check_names(config.pool.preload, registry)
    metrics = Metrics(lambda: pool.in_flight, lambda: pool.restarts)
    pool = make_pool(metrics)
    metrics.watch_workers(tuple(state.value for state in State), lambda: pool.states())
    metrics.watch_adapters(lambda: len(registry), lambda: pool.residency.nbytes, lambda: pool.residency.waiting)
    catalog = Catalog(registry, pool, checks, uploads)
    watcher = None
    if config.adapters_dir is not None:
        watcher = Watcher(catalog, config.adapters_dir.absolute(), listing)
    admin = AdminState(catalog, allowed_roots(config), config.max_adapter_size, watcher.problems if watcher else {})
    proxy = Proxy(catalog, pool, metrics, checks.base_names, config.strict_models)
    return _Server(proxy, admin, watcher, preload=config.pool.preload)


def _shared(config: Config, make_backend: Callable[[], Backend], *, two_fit: bool = True) -> Callable[[Metrics], Pool]:
    """A pool whose worker runs any adapter sets at once. ``two_fit``: there is memory for two of them."""

    def make_pool(metrics: Metrics) -> Pool:
        return WorkerPool(
            make_backend,
            metrics,
            slots=config.engine.parallel,
            max_queue=config.http.max_queue,
            limits=WorkerLimits(config.adapter_memory, config.ignore_unsupported, two_fit),
        )

    return make_pool


def _checks(config: Config, model: Path) -> Checks:
    try:
        base = BaseModel.from_gguf(model)
    except ApiError as error:
        raise StartFailed(error.message) from error
    if not _keeps_8_bits(config):
        base = replace(base, quantised=frozenset())
    unsupported = Unsupported.LEAVE_OUT if config.ignore_unsupported else Unsupported.REFUSE
    names = frozenset({*config.aliases, str(config.model), model.name, model.stem})
    return Checks(base, names, unsupported, experts=config.engine.lora_mode == "graph")


def _keeps_8_bits(config: Config) -> bool:
    """Whether adapters are kept in 8 bits where they may; a device and other servers keep them in f16."""
    engine = config.engine
    on_delta_path = config.backend.kind == "embedded" and engine.lora_mode == "delta"
    return on_delta_path and engine.adapter_type == "auto" and engine.gpu_layers == 0


def _worker_settings(config: Config, model: Path) -> WorkerSettings:
    engine = config.engine
    return WorkerSettings(
        model=model,
        socket=Path("worker.sock"),
        alias=config.aliases[0] if config.aliases else "",
        parallel=engine.parallel,
        ctx_size=engine.ctx_size,
        threads=engine.threads,
        threads_batch=engine.threads_batch,
        batch_size=engine.batch_size,
        ubatch_size=engine.ubatch_size,
        gpu_layers=engine.gpu_layers,
        prompt_chunk=engine.prompt_chunk,
        prompt_budget=2 * engine.prompt_chunk,
        cache_ram_mib=-(-engine.cache_ram // 1024**2),
        use_mmap=engine.mmap,
        use_extra_bufts=engine.repack,
        fast_products=engine.fast_products,
        adapter_type=engine.adapter_type,
    )


async def _serve(config: Config, server: _Server, keys: tuple[str, ...], announce: Callable[[str], None]) -> None:
    proxy = server.proxy
    stop, hurry = _watch_signals()
    passthrough = Passthrough(keep_key=not keys) if config.backend.kind == "llama-server" else None
    instead = ollama_fronting.HANDLERS if config.backend.kind == "ollama" else None
    app = make_app(proxy, config.http, keys, server.admin, passthrough, instead)
    # handler_cancellation: a client that goes away cancels its handler, which closes the worker's connection.
    runner = Runner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1, logger=server_log())
    await runner.setup()
    try:
        site, url = await _listen(runner, config.http)
        log.info("loading %s", config.model or ", ".join(config.backend.urls))
        if await _unless(stop, _start(server)):
            announce(url)
            await _unless(stop, _follow(server))
        await site.stop()
        changes, timeout = server.admin.changes, config.http.drain_timeout
        if in_flight := proxy.pool.in_flight + changes.under_way:
            wait = f"up to {timeout:g} s to end; a second Ctrl-C or SIGTERM ends them at once"
            log.info("shutting down: requests in flight (%d) have %s", in_flight, wait)
        else:
            log.info("shutting down")
        await _unless(hurry, _all(proxy.pool.drain(timeout), changes.drain(timeout)))
    finally:
        await server.admin.changes.close()
        await _unless(hurry, proxy.pool.close(_WORKER_GRACE))
        await proxy.pool.close(0)
        await proxy.catalog.close()
        await runner.cleanup()
        if config.http.host.endswith(".sock"):
            with suppress(OSError):
                os.unlink(config.http.host)


async def _start(server: _Server) -> None:
    await server.proxy.pool.start(await loaded_first(server.proxy.catalog, server.preload))


async def _all(*work: Coroutine[Any, Any, Any]) -> None:
    await asyncio.gather(*work)


async def _follow(server: _Server) -> None:
    """Read what was registered unread, and keep the catalog as the watched folder is, until cancelled."""
    watching = server.watcher.run() if server.watcher else asyncio.Event().wait()
    catalog = server.proxy.catalog
    serving = server.served.follow(catalog) if server.served else Follower(catalog).run()
    await asyncio.gather(catalog.read_pending(), watching, serving)


def _watch_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Two events: the first SIGTERM or SIGINT asks to drain, the second to end at once."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop, hurry


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, Any]) -> bool:
    """Run ``work`` until it ends or ``event`` is set, which cancels it. True when it ended; raises what it raises."""
    task = asyncio.create_task(work)
    waiter = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if task.cancelled():
        return False
    task.result()
    return True


async def _listen(runner: web.AppRunner, config: HttpConfig) -> tuple[web.BaseSite, str]:
    """Listen, and give the site and its URL. Raises StartFailed when the address cannot be used."""
    host, port = config.host, config.port
    if host.endswith(".sock"):
        site: web.BaseSite = web.UnixSite(runner, host)
        name = f"the unix socket {host}"
    else:
        site = web.TCPSite(runner, host, port)
        name = f"{host}:{port}"
    try:
        await site.start()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartFailed(f"{name} is already in use; choose another with --port") from error
        raise StartFailed(f"cannot listen on {name}: {error.strerror or error}") from error
    if host.endswith(".sock"):
        return site, f"unix:{host}"
    bound = runner.addresses[0][1]
    return site, f"http://{f'[{host}]' if ':' in host else host}:{bound}"


def _is_local(host: str) -> bool:
    if host.endswith(".sock") or host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False
