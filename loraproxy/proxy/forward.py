"""Forwarding: one request to the worker, its answer back; a stream is copied as it comes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from loraproxy.errors import ApiError, WorkerUnreached
from loraproxy.logs import id_header
from loraproxy.pool.base import Leased, Pool
from loraproxy.proxy.accounting import Account
from loraproxy.proxy.copying import copy_body

_NOT_COPIED = frozenset(
    {
        "connection",
        "content-length",
        "date",
        "keep-alive",
        "server",
        "transfer-encoding",
        "x-request-id",
    }
)
"""Headers of one connection, and those the proxy sets itself."""


_JSON_HEADERS = {"Content-Type": "application/json"}


def _ignore(chunk: bytes) -> None:
    pass


@dataclass(frozen=True)
class Upstream:
    """What is sent to the worker."""

    method: str
    path: str
    """With the query string."""
    body: bytes | None = None


async def forward(
    request: web.Request,
    pool: Pool,
    worker: Leased,
    upstream: Upstream,
    *,
    headers: Mapping[str, str],
    account: Account | None = None,
) -> web.StreamResponse:
    """Send ``upstream`` to ``worker`` and its answer, with ``headers`` added, to the client.

    ``account`` is told what goes by.

    Cancelling it (the client went away) closes the connection, which is how the worker learns of it. Raises
    WorkerUnreached where nothing was sent, and WorkerFailed or Unavailable when the worker breaks the connection
    before the answer began; later than that a stream ends with an error event.
    """
    answer = await send(pool, worker, upstream)
    try:
        if answer.content_type == "text/event-stream":
            return await _copy_stream(request, pool, answer, headers, account)
        try:
            body = await answer.read()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise pool.broken() from error
        if account is not None and answer.status == 200:
            account.whole(body)
        return web.Response(body=body, status=answer.status, headers=_merged(answer, headers))
    finally:
        # Closes the connection unless the answer was read to its end.
        answer.release()


async def send(pool: Pool, worker: Leased, upstream: Upstream) -> aiohttp.ClientResponse:
    """The worker's answer, its body unread, for the caller to release.

    Raises WorkerUnreached where nothing was sent, WorkerFailed or Unavailable where the connection broke.
    """
    session = worker.backend.session
    if session.closed:
        raise WorkerUnreached("the worker has just ended; try again later", retry_after=1)
    try:
        return await session.request(
            upstream.method,
            worker.backend.base_url + upstream.path,
            data=upstream.body,
            headers=_JSON_HEADERS | id_header() if upstream.body is not None else id_header(),
        )
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise WorkerUnreached("the worker does not accept connections; try again later", retry_after=1) from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise pool.broken() from error


async def _copy_stream(
    request: web.Request,
    pool: Pool,
    answer: aiohttp.ClientResponse,
    headers: Mapping[str, str],
    account: Account | None,
) -> web.StreamResponse:
    """Copy server-sent events as they come."""
    response = web.StreamResponse(status=answer.status, headers=_merged(answer, headers))
    try:
        await response.prepare(request)
        if not await copy_body(request, answer, response, account.chunk if account else _ignore):
            if account is not None:
                account.cut_off("error")
            await response.write(_error_event(pool.broken()))
        await response.write_eof()
    except ConnectionResetError:
        if account is not None:  # writing failed: the client is gone
            account.cut_off("cancelled")
    return response


def _error_event(error: ApiError) -> bytes:
    return b"data: " + json.dumps(error.body()).encode() + b"\n\n"


def _merged(answer: aiohttp.ClientResponse, headers: Mapping[str, str]) -> CIMultiDict[str]:
    merged = CIMultiDict((name, value) for name, value in answer.headers.items() if name.lower() not in _NOT_COPIED)
    merged.update(headers)
    return merged
