"""What every request passes: an id, CORS, errors as JSON, the loading state and the API key.

Order and answers are llama-server's (the pre-routing handler of tools/server/server-http.cpp).
"""

from __future__ import annotations

import hmac
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from loraproxy import __version__
from loraproxy.config import CorsConfig, HttpConfig
from loraproxy.errors import (
    ApiError,
    NotFound,
    RequestTimeout,
    ServerError,
    StartFailed,
    Unauthorized,
    Unavailable,
)
from loraproxy.logs import ACCESS, ID_HEADER, REQUEST_ID, SANE_ID
from loraproxy.pool.base import Pool
from loraproxy.proxy import ollama_relay
from loraproxy.proxy.accounting import account_of

log = logging.getLogger(__name__)

_CLIENT_CLOSED_REQUEST = 499
"""The status that a log line has where the client left before there was one; nginx's."""
_OLLAMA_PATH = re.compile(r"(/lora/[^/]*)?/api/")
_ID: Any = web.RequestKey("request_id", str) if hasattr(web, "RequestKey") else "request_id"  # a word before 3.14
_PUBLIC_PATHS = frozenset({"/health", "/v1/health", "/"})


def error_response(request: web.Request, error: ApiError) -> web.Response:
    """``error`` as llama-server's JSON, or Ollama's under ``/api``, with Retry-After where it knows one."""
    if _OLLAMA_PATH.match(request.path):
        return ollama_relay.error_response(error)
    response = web.json_response(error.body(), status=error.status)
    if isinstance(error, Unavailable) and error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    return response


@web.middleware
async def identified(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id, for the log lines of all that is done for it, and log it when it ends."""
    began = perf_counter()
    REQUEST_ID.set(request_id(request))
    status = _CLIENT_CLOSED_REQUEST
    try:
        response = await handler(request)
        status = response.status
        return response
    except web.HTTPException as error:
        status = error.status
        raise
    finally:
        if ACCESS.isEnabledFor(logging.INFO):
            ACCESS.info("event=request", extra={"fields": _what_was_done(request, status, perf_counter() - began)})


def _what_was_done(request: web.Request, status: int, seconds: float) -> dict[str, Any]:
    """The fields of a finished request's line; neither query nor body nor headers, which may hold secrets."""
    fields: dict[str, Any] = {
        "method": request.method,
        "path": request.rel_url.raw_path,
        "status": status,
        "seconds": round(seconds, 6),
    }
    if (account := account_of(request)) is not None:
        fields |= {"outcome": account.outcome, "lora": account.label}
        if account.queued is not None:
            fields["queue_seconds"] = round(account.queued, 6)
        if account.first is not None:
            fields["ttft_seconds"] = round(account.first, 6)
        tokens = account.tokens
        fields |= {
            "prompt_tokens": tokens.prompt,
            "cached_tokens": tokens.cached,
            "generated_tokens": tokens.generated,
        }
    return fields


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every exception into an answer with llama-server's body."""
    try:
        return await handler(request)
    except ApiError as error:
        answer = error_response(request, error)
        if request.content.exception() is not None or isinstance(error, RequestTimeout):
            answer.force_close()  # aiohttp closes after a broken body: the client must not send its next request there
        return answer
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
        return error_response(request, NotFound("File Not Found"))
    except web.HTTPException:
        raise
    except ConnectionResetError:
        raise  # the client is gone: there is nobody to answer
    except Exception:
        name = request_id(request)
        log.exception("%s %s failed", request.method, request.rel_url.raw_path)
        fault = ServerError(f"internal error; the server's log has the details of request {name}")
        return error_response(request, fault)


def cors(config: CorsConfig) -> Middleware:
    """llama-server's CORS: the origin goes on every answer, a preflight needs no API key."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "OPTIONS":
            return await handler(request)
        headers = {
            "Access-Control-Allow-Credentials": "true" if config.credentials else "false",
            "Access-Control-Allow-Methods": config.methods,
            "Access-Control-Allow-Headers": config.headers,
        }
        return web.Response(body=b"", content_type="text/html", headers=headers)

    return middleware


def allowed_origin(config: CorsConfig, origin: str) -> str:
    """The value of Access-Control-Allow-Origin for a request's ``origin``; empty: no such header."""
    if config.origins == "*" and config.credentials:
        return origin  # browsers refuse `*` with credentials, so the origin is echoed
    if config.origins == "localhost":
        return origin if _is_localhost(origin) else ""
    return config.origins


def _is_localhost(origin: str) -> bool:
    try:
        return urlsplit(origin).hostname in ("localhost", "127.0.0.1", "::1")
    except ValueError:
        return False


def api_keys(config: HttpConfig) -> tuple[str, ...]:
    """The keys of the configuration and of its key file. Raises StartFailed when the file cannot be read."""
    keys = [key for key in config.api_keys if key]
    if config.api_key_file is not None:
        keys += _read_keys(config.api_key_file)
        if not keys:
            raise StartFailed(f"the API key file {config.api_key_file} holds no key, which would leave the API open")
    return tuple(keys)


def _read_keys(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartFailed(f"cannot read the API key file {path}: {getattr(error, 'strerror', error)}") from error
    return [line for line in lines if line and not line.startswith("#")]


def gate(pool: Pool, keys: Iterable[str]) -> Middleware:
    """503 until the worker is first ready, then 401 without a key; health needs none. In llama-server's order."""
    known = [key.encode() for key in keys]

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not pool.started:
            pool.reach()  # raises Unavailable: loading or shutting down
        if known and request.path not in _PUBLIC_PATHS and not _has_key(request, known):
            raise Unauthorized("Invalid API Key")
        return await handler(request)

    return middleware


def _has_key(request: web.Request, known: list[bytes]) -> bool:
    given = request.headers.get("Authorization") or request.headers.get("X-Api-Key") or ""
    key = given.removeprefix("Bearer ").encode("utf-8", "surrogateescape")
    # Every key is compared to its end: the time taken must not tell how much of a key was right, or which one.
    matches = [hmac.compare_digest(key, candidate) for candidate in known]
    return any(matches)


def prepare_headers(config: CorsConfig) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """An ``on_response_prepare`` handler: the request id, CORS and the server's name on every answer."""

    async def on_prepare(request: web.Request, response: web.StreamResponse) -> None:
        headers = response.headers
        headers["Server"] = f"loraproxy/{__version__}"
        headers[ID_HEADER] = request_id(request)
        if origin := allowed_origin(config, request.headers.get("Origin", "")):
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = "X-LoRA, X-Request-Id"
            if origin != "*":
                headers["Vary"] = "Origin"

    return on_prepare


def request_id(request: web.Request) -> str:
    """The client's X-Request-Id where it is short and printable, else a new one; the same whenever it is asked."""
    name: str | None = request.get(_ID)
    if name is None:
        given = request.headers.get(ID_HEADER, "")
        name = request[_ID] = given if SANE_ID.fullmatch(given) else uuid.uuid4().hex
    return name
