"""A worker's answer, on its way to a client of Ollama's API."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from loraproxy.errors import ApiError
from loraproxy.proxy.accounting import Account, account_of
from loraproxy.proxy.ollama_answers import NDJSON, OllamaAnswer, error_body

Broken = Callable[[], ApiError]
"""The error of a request whose connection to the worker broke."""


def error_response(error: ApiError) -> web.Response:
    """An error as Ollama answers it: ``{"error": "text"}`` with its status."""
    response = web.json_response(error_body(error), status=error.status)
    retry_after = getattr(error, "retry_after", None)
    if retry_after is not None:
        response.headers["Retry-After"] = str(retry_after)
    return response


async def relay(
    request: web.Request,
    upstream: aiohttp.ClientResponse,
    answer: OllamaAnswer,
    *,
    broken: Broken,
    headers: Mapping[str, str],
) -> web.StreamResponse:
    """Send the worker's answer ``upstream`` to the client in Ollama's shape, with ``headers`` added.

    A stream that breaks off ends with a line that says ``broken()``; an answer that breaks off before it began raises
    it. The caller releases ``upstream``; doing so before its end is how the worker learns that the client is gone.
    """
    account = account_of(request)
    if upstream.status != 200 or upstream.content_type != "text/event-stream":
        return await relay_whole(upstream, answer.whole, broken=broken, headers=headers, account=account)
    response = web.StreamResponse(headers={**headers, "Content-Type": NDJSON})
    try:
        await response.prepare(request)
        while chunk := await next_bytes(upstream):
            if account is not None:
                account.chunk(chunk)
            if lines := answer.feed(chunk):
                await response.write(lines)
        if not answer.ended:
            if account is not None:
                account.cut_off("error")
            await response.write(answer.close(broken()))
        await response.write_eof()
    except ConnectionResetError:  # writing failed: the client is gone
        if account is not None:
            account.cut_off("cancelled")
    return response


async def relay_whole(
    upstream: aiohttp.ClientResponse,
    shape: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    *,
    broken: Broken,
    headers: Mapping[str, str],
    account: Account | None = None,
) -> web.Response:
    """The worker's answer, not streamed, in the shape that ``shape`` gives it; its errors as Ollama's.

    Raises ``broken()`` where it breaks off.
    """
    try:
        raw = await upstream.read()
        value = json.loads(raw)
    except (aiohttp.ClientError, ConnectionError, ValueError) as error:
        raise broken() from error
    if upstream.status == 200:
        if account is not None:
            account.whole(raw)
        return web.json_response(shape(value), headers=headers)
    message = str((value.get("error") or {}).get("message", ""))
    kept = {name: upstream.headers[name] for name in ("Retry-After",) if name in upstream.headers}
    return web.json_response({"error": message}, status=upstream.status, headers={**headers, **kept})


async def next_bytes(upstream: aiohttp.ClientResponse) -> bytes:
    """The next bytes; none at the end, or where the stream breaks off, which is too early an end to the answer."""
    try:
        return await upstream.content.readany()
    except (aiohttp.ClientError, ConnectionError):
        return b""
