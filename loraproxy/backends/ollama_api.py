"""What this project uses of Ollama's HTTP API, and everything it takes for granted about it.

Written from Ollama's published documentation (docs/api.md) and, where that is silent, from how its server behaves
(server/routes.go, server/create.go, types/model/name.go of github.com/ollama/ollama, seen up to 0.34). The
assumptions, each used where its number stands:

1.  Errors are ``{"error": "text"}`` with an HTTP status. In a stream that has begun they are one more line of that
    form, after a status of 200. Streams are lines of JSON (``application/x-ndjson``).
2.  A name is ``[host/][namespace/]model[:tag]``; the tag defaults to ``latest`` and is always shown in lists. Each of
    model and tag has 1 to 80 characters of ``A-Z a-z 0-9 _ - .``, the first none of ``- .``; case does not count.
3.  ``HEAD /api/blobs/sha256:HEX`` is 200 or 404. ``POST`` to it takes the bytes: 201, 200 if they were there already,
    400 if they have another digest. Blobs that no model refers to are removed when the server starts.
4.  ``POST /api/create`` with ``from`` and ``adapters`` ({file name: digest}) makes a model that shares the base's
    blobs. One adapter only ("only one adapter is currently supported"), a GGUF LoRA, applied at scale 1. The last
    status is ``success``. If ``from`` is not there, the server tries to pull it.
5.  ``license`` adds to the base's licenses and comes back in ``/api/show``'s ``license``, a text of all of them, one
    after another. It is the one place where a model can say what it was made of without changing what it generates.
6.  Since 0.34.1 ``/api/create`` refuses adapters ("LoRA adapters are no longer supported"), before it looks at the
    name; models made before still work. Servers without that refuse a model without a name first.
7.  Deleting a model removes the blobs that no other model refers to. Of an unknown model: 404.
8.  A model is loaded by the first request for it, which can take minutes, and is unloaded ``keep_alive`` (default five
    minutes) after its last.
9.  ``/api/generate`` and ``/api/chat`` stream unless ``stream`` is false; the last object has ``done: true``, a
    ``done_reason`` (``stop``: end of text or a stop string; ``length``), token counts, and durations in nanoseconds.
10. Options that the server does not know are ignored (it logs them), so a misspelt or removed one has no effect;
    ``mirostat`` and its companions were removed in 2025.
11. ``/api/show`` has the GGUF's metadata in ``model_info`` (arrays of more than five values are left out unless
    ``verbose``) and ``name``, ``type`` and ``shape`` of every tensor in ``tensors``.
12. The server's default options differ from llama-server's: ``top_p`` 0.9, ``min_p`` 0, ``repeat_penalty`` 1.1.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from loraproxy.errors import (
    ApiError,
    InvalidRequest,
    NotFound,
    NotSupported,
    PayloadTooLarge,
    ServerError,
    Unavailable,
    WorkerFailed,
)

DEFAULT_URL = "http://127.0.0.1:11434"
DEFAULT_TAG = "latest"
ADAPTERS_REFUSED = "adapters are no longer supported"
"""Part of what servers since 0.34.1 say (assumption 6)."""
NO_ADAPTERS = (
    "this Ollama cannot make models with LoRA adapters (releases since 0.34.1 refuse to); run Ollama 0.34.0 or older, "
    "or serve the model with the embedded or the llama-server backend"
)
_RETRY_AFTER = 2
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10)
"""None on answers: loading a model, or making one, takes as long as it takes (assumption 8)."""
_NO_NAME = ""


def new_session() -> aiohttp.ClientSession:
    """Connections to an Ollama server that serve one request each.

    A server, or what stands before it, closes connections that were idle for a while; a request that is under way then
    cannot be told from one that it has seen, and must not be sent twice.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True), cookie_jar=aiohttp.DummyCookieJar()
    )


def full_name(name: str) -> str:
    """``name`` with its tag, in lower case: what lists show and how names are compared (assumption 2)."""
    tail = name.rpartition("/")[2]
    return (name if ":" in tail else f"{name}:{DEFAULT_TAG}").lower()


@dataclass(frozen=True)
class ModelEntry:
    """One model of ``/api/tags``."""

    name: str
    """With its tag."""
    digest: str
    """Hex SHA-256 of its manifest: another one whenever anything of the model changes."""
    size: int
    """Bytes of all its blobs, shared ones included."""
    details: Mapping[str, Any]
    """``family``, ``parameter_size``, ``quantization_level`` and others."""


class OllamaClient:
    """One Ollama server.

    Every method raises Unavailable when the server cannot be reached, WorkerFailed when it breaks the connection,
    NotFound for a model it does not have, InvalidRequest, NotSupported or ServerError with its own words otherwise.
    """

    def __init__(self, session: aiohttp.ClientSession, base_url: str = DEFAULT_URL) -> None:
        """``session`` stays the caller's."""
        self._session = session
        self.base_url = base_url.rstrip("/")

    async def version(self) -> str:
        """The server's version, ``0.12.3`` say."""
        return str((await self._json("GET", "/api/version")).get("version", ""))

    async def tags(self) -> list[ModelEntry]:
        """All models the server has."""
        return [
            ModelEntry(
                name=str(model.get("name") or model.get("model") or ""),
                digest=str(model.get("digest") or ""),
                size=int(model.get("size") or 0),
                details=model.get("details") or {},
            )
            for model in (await self._json("GET", "/api/tags")).get("models") or []
        ]

    async def show(self, model: str, *, verbose: bool = False) -> dict[str, Any]:
        """What the server says of a model: ``template``, ``license``, ``model_info``, ``capabilities`` and more.

        verbose: with all of its metadata, long arrays and the vocabulary too, which is megabytes.
        """
        return await self._json("POST", "/api/show", {"model": model, "verbose": verbose})

    async def running(self) -> list[dict[str, Any]]:
        """The models in memory, as ``/api/ps`` lists them."""
        models: list[dict[str, Any]] = (await self._json("GET", "/api/ps")).get("models") or []
        return models

    async def takes_adapters(self) -> bool:
        """False for a server that refuses adapters in ``/api/create``; nothing is made by asking (assumption 6)."""
        request = {"model": _NO_NAME, "adapters": {"adapter.gguf": "sha256:" + 64 * "0"}, "stream": False}
        try:
            await self._json("POST", "/api/create", request)
        except NotSupported:
            return False
        except InvalidRequest:
            pass  # no name: the refusal that was meant to come
        return True

    async def has_blob(self, digest: str) -> bool:
        """True if the server has the content with this digest, ``sha256:HEX`` (assumption 3)."""
        async with self._request("HEAD", f"/api/blobs/{digest}") as answer:
            if answer.status == 404:
                return False
            await self._check(answer)
            return True

    async def push_blob(self, digest: str, path: Path) -> None:
        """Upload the file at ``path``, whose digest is ``digest`` (``sha256:HEX``). OSError if it cannot be read."""
        file = await asyncio.to_thread(path.open, "rb")
        with file:
            headers = {"Content-Type": "application/octet-stream"}
            async with self._request("POST", f"/api/blobs/{digest}", data=file, headers=headers) as answer:
                await self._check(answer)

    async def create(
        self,
        model: str,
        base: str,
        adapters: Mapping[str, str],
        *,
        note: str = "",
        on_status: Callable[[str], None] = lambda status: None,
    ) -> None:
        """Make ``model`` from ``base`` with ``adapters``, file names to ``sha256:HEX`` digests of pushed blobs.

        note: kept as one more license of the model (assumption 5). on_status: called with each status the server
        reports. Raises NotSupported if this server takes no adapters (assumption 6).
        """
        request: dict[str, Any] = {"model": model, "from": base}
        if adapters:
            request["adapters"] = dict(adapters)
        if note:
            request["license"] = note
        status = ""
        async for progress in self._stream("/api/create", request):
            status = str(progress.get("status", ""))
            on_status(status)
        if status != "success":
            raise ServerError(f"Ollama ended the creation of {model!r} after {status!r}, without success")

    async def delete(self, model: str) -> None:
        """Remove a model."""
        async with self._request("DELETE", "/api/delete", json={"model": model}) as answer:
            await self._check(answer)

    def generate(self, request: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The objects of ``/api/generate``, as they come; close the iterator to cancel."""
        return self._stream("/api/generate", {**request, "stream": True})

    def chat(self, request: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The objects of ``/api/chat``, as they come; close the iterator to cancel."""
        return self._stream("/api/chat", {**request, "stream": True})

    def ask(self, path: str, request: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The objects of an answer to a request as it is, streamed or one; close the iterator to cancel."""
        return self._stream(path, request)

    async def embed(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of ``/api/embed``."""
        return await self._json("POST", "/api/embed", request)

    async def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        async with self._request(method, path, json=body) as answer:
            await self._check(answer)
            return _object(await answer.read(), path)

    async def _stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The objects of a stream of lines. Lines have no length limit here: an answer's ``context`` can be long."""
        async with self._request("POST", path, json=body) as answer:
            await self._check(answer)
            pending = b""
            while True:
                chunk = await answer.content.readany()
                *lines, pending = (pending + chunk).split(b"\n")
                if not chunk and pending:
                    lines, pending = [pending], b""
                for line in filter(bytes.strip, lines):
                    found = _object(line, path)
                    if isinstance(error := found.get("error"), str):
                        raise _error(500, error)
                    yield found
                if not chunk:
                    return

    @asynccontextmanager
    async def _request(self, method: str, path: str, **arguments: Any) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """A request whose answer is closed with the block; aiohttp's errors become ours, in the block too."""
        try:
            async with self._session.request(method, self.base_url + path, timeout=_TIMEOUT, **arguments) as answer:
                yield answer
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
            raise Unavailable(
                f"the Ollama server at {self.base_url} cannot be reached ({_reason(error)}); is it running?",
                retry_after=_RETRY_AFTER,
            ) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise WorkerFailed(
                f"the Ollama server at {self.base_url} broke the connection: {_reason(error)}"
            ) from error

    async def _check(self, answer: aiohttp.ClientResponse) -> None:
        """Raise the error that an answer is (assumption 1)."""
        if answer.status < 400:
            return
        text = (await answer.read()).decode("utf-8", "replace").strip()
        try:
            message = json.loads(text)["error"]
        except (ValueError, TypeError, KeyError):
            message = text[:200] or answer.reason or "no reason given"
        raise _error(answer.status, str(message))


def _error(status: int, message: str) -> ApiError:
    """An error of the server as one of ours."""
    if ADAPTERS_REFUSED in message:
        return NotSupported(NO_ADAPTERS)
    text = f"Ollama: {message}"
    if status == 503:
        return Unavailable(text, retry_after=_RETRY_AFTER)
    kinds: dict[int, type[ApiError]] = {
        400: InvalidRequest,
        404: NotFound,
        413: PayloadTooLarge,
        501: NotSupported,
    }
    if status in kinds:
        return kinds[status](text)
    return ServerError(text if status >= 500 else f"Ollama refused a request with status {status}: {message}")


def _object(data: bytes, path: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise WorkerFailed(f"Ollama's answer to {path} is not the JSON object it should be: {data[:80]!r}")
    return value


def _reason(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.strerror or str(error.os_error) or type(error.os_error).__name__
    return " ".join(str(error).split()) or type(error).__name__
