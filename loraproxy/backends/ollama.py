"""An Ollama server as one worker: nothing is started but the bridge, an application on a unix socket of ours."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.gguf_write import AdapterDtype
from loraproxy.adapters.unsupported import Unsupported
from loraproxy.backends.base import WorkerExit
from loraproxy.backends.embedded import Liveness
from loraproxy.backends.ollama_api import DEFAULT_URL, NO_ADAPTERS, OllamaClient, full_name, new_session
from loraproxy.backends.ollama_base import base_model
from loraproxy.backends.ollama_bridge import Bridge
from loraproxy.backends.ollama_models import PREFIX, DerivedModels
from loraproxy.errors import ApiError, StartFailed, Unavailable

log = logging.getLogger(__name__)

_SOCKET = "ollama.sock"
_SOCKET_PATH_LIMIT = 103
"""Bytes a unix socket's path may have on macOS (104 with the closing zero; 108 on Linux)."""


@dataclass(frozen=True)
class OllamaSettings:
    """Which model of which server, and how it is used."""

    model: str
    """The base model's name on the server."""
    url: str = DEFAULT_URL
    alias: str = ""
    """The base model's public name; its name on the server if empty."""
    dtype: AdapterDtype = "f16"
    """How the weights of composed adapters are stored."""
    ignore_unsupported: bool = False


class OllamaBackend:
    """A :class:`loraproxy.backends.base.Backend`; not started twice."""

    base_url = "http://ollama"

    def __init__(self, settings: OllamaSettings, liveness: Liveness | None = None) -> None:
        self._settings = settings
        self._liveness = liveness or Liveness()
        self._open = AsyncExitStack()
        self._session: aiohttp.ClientSession | None = None
        self._client: OllamaClient | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """Where to send requests; only between ``start`` and ``stop``."""
        assert self._session is not None
        return self._session

    async def start(self) -> None:
        """Check the server and its model and open the bridge. Raises StartFailed."""
        settings = self._settings
        upstream = await self._open.enter_async_context(new_session())
        self._client = client = OllamaClient(upstream, settings.url)
        base = await _look(client, settings)
        takes_adapters = await _takes_adapters(client)
        if not takes_adapters:
            log.warning("%s; sets whose models are already there still work", NO_ADAPTERS)
        folder = _make_runtime_folder()
        self._open.callback(shutil.rmtree, folder, ignore_errors=True)
        kind = Unsupported.LEAVE_OUT if settings.ignore_unsupported else Unsupported.REFUSE
        models = DerivedModels(client, settings.model, base, dtype=settings.dtype, unsupported=kind, folder=folder)
        models.takes_adapters = takes_adapters
        self._open.push_async_callback(models.close)
        bridge = Bridge(client, models, base, settings.model, settings.alias or settings.model)
        runner = web.AppRunner(bridge.app(), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        self._open.push_async_callback(runner.cleanup)
        await web.UnixSite(runner, str(folder / _SOCKET)).start()
        self._session = await self._open.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(folder / _SOCKET), limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        )

    async def wait(self) -> WorkerExit:
        """Return when the server has not answered for a while: that is how a server that is not ours ends."""
        assert self._client is not None
        failures, last = 0, ""
        while failures < self._liveness.failures:
            await asyncio.sleep(self._liveness.interval)
            try:
                await asyncio.wait_for(self._client.version(), self._liveness.timeout)
                failures = 0
            except asyncio.TimeoutError:
                failures, last = failures + 1, f"the Ollama server at {self._client.base_url} does not answer"
            except ApiError as error:
                failures, last = failures + 1, error.message
        return WorkerExit(1, (f"error: {last}",))

    async def stop(self, grace: float) -> None:
        """Close the bridge and its connections, at once; the server and its models stay as they are."""
        await self._open.aclose()


async def look(settings: OllamaSettings) -> BaseModel:
    """What the server says of its model, as adapters see it. Raises StartFailed."""
    async with new_session() as session:
        return await _look(OllamaClient(session, settings.url), settings)


async def _look(client: OllamaClient, settings: OllamaSettings) -> BaseModel:
    try:
        await client.version()
    except Unavailable as error:
        raise StartFailed(error.message) from error
    except ApiError as error:
        raise StartFailed(
            f"what answers at {client.base_url} is no Ollama server ({error.message}); give its address alone, as in"
            f" {DEFAULT_URL}"
        ) from error
    try:
        names = [entry.name for entry in await client.tags()]
        if full_name(settings.model) not in map(full_name, names):
            known = ", ".join(sorted(name for name in names if not name.startswith(PREFIX))) or "none"
            raise StartFailed(
                f"the Ollama server at {client.base_url} has no model {settings.model!r}; it has: {known}"
            )
        return await base_model(client, settings.model)
    except ApiError as error:
        raise StartFailed(error.message) from error


async def _takes_adapters(client: OllamaClient) -> bool:
    try:
        return await client.takes_adapters()
    except ApiError as error:
        raise StartFailed(error.message) from error


def _make_runtime_folder() -> Path:
    """A new folder of mode 0700 whose path leaves room for the socket's name."""
    folder = Path(tempfile.mkdtemp(prefix="loraproxy-"))
    if len(os.fsencode(folder / _SOCKET)) <= _SOCKET_PATH_LIMIT:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="loraproxy-", dir="/tmp"))
