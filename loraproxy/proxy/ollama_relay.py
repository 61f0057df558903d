"""A worker's answer, on its way to a client of Ollama's API."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import aiohttp
from aiohttp import web

from loraproxy.errors import ApiError
from loraproxy.proxy.ollama_answers import NDJSON, OllamaAnswer, error_body


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
    broken: Callable[[], ApiError],
    headers: Mapping[str, str],
) -> web.StreamResponse:
    """Send the worker's answer ``upstream`` to the client in Ollama's shape, with ``headers`` added.

    A stream that breaks off ends with a line that says ``broken()``; an answer that breaks off before it began raises
    it. The caller releases ``upstream``; doing so before its end is how the worker learns that the client is gone.
    """
    try:
        if upstream.status != 200 or upstream.content_type != "text/event-stream":
            value = json.loads(await upstream.read())
            if upstream.status == 200:
                return web.json_response(answer.whole(value), headers=headers)
            message = str((value.get("error") or {}).get("message", ""))
            return web.json_response({"error": message}, status=upstream.status, headers=headers)
    except (aiohttp.ClientError, ConnectionError, ValueError) as error:
        raise broken() from error
    response = web.StreamResponse(headers={**headers, "Content-Type": NDJSON})
    try:
        await response.prepare(request)
        while chunk := await _next(upstream):
            if lines := answer.feed(chunk):
                await response.write(lines)
        if not answer.ended:
            await response.write(answer.close(broken()))
        await response.write_eof()
    except ConnectionResetError:
        pass  # writing failed: the client is gone
    return response


async def _next(upstream: aiohttp.ClientResponse) -> bytes:
    """The next bytes; none at the end, or where the stream breaks off, which is too early an end to the answer."""
    try:
        return await upstream.content.readany()
    except (aiohttp.ClientError, ConnectionError):
        return b""
