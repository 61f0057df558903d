"""In front of llama-server: every endpoint and field goes through untouched; adapter selection alone is translated.

A request that generates has its selectors (:mod:`loraproxy.adapters.selectors`) turned into the ``lora`` field that
its server understands, set into the text of the body; nothing else of it is touched. Answers are copied as they come.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from loraproxy.adapters.sets import BASE, AdapterSet
from loraproxy.backends.llama_server import LlamaServers
from loraproxy.backends.llama_server_places import Place
from loraproxy.errors import ApiError, InvalidRequest, NotSupported, Unavailable, WorkerFailed
from loraproxy.logs import id_header
from loraproxy.pool.base import Leased
from loraproxy.proxy.accounting import Account, open_account
from loraproxy.proxy.body import parse_object, read_body
from loraproxy.proxy.context import PROXY
from loraproxy.proxy.copying import copy_body
from loraproxy.proxy.splice import with_member

TAKING_LORA = frozenset(
    {
        "/completion",
        "/completions",
        "/v1/completions",
        "/chat/completions",
        "/v1/chat/completions",
        "/infill",
        "/responses",
        "/v1/responses",
    }
)
"""Where llama-server looks at ``lora`` (tools/server/server-schema.cpp and the endpoints that come to it)."""

UNDER_ITS_SCALES = frozenset(
    {
        "/v1/messages",
        "/embedding",
        "/embeddings",
        "/v1/embeddings",
        "/rerank",
        "/reranking",
        "/v1/rerank",
        "/v1/reranking",
    }
)
"""What llama-server runs under its own scales alone, whatever the body says."""

_OF_A_CONNECTION = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "content-length"}
)
_NOT_SENT = _OF_A_CONNECTION | {"host", "expect", "content-encoding"}
"""The last since bodies come decompressed from aiohttp."""
_NOT_COPIED = _OF_A_CONNECTION | {"date", "server", "x-request-id"}
_KEYS = frozenset({"authorization", "x-api-key"})


class Upstream:
    """What is asked of a server: the method, the target with its query, the headers, the body."""

    def __init__(self, request: web.Request, body: bytes | None, keep_key: bool) -> None:
        self.method = request.method
        target, prefix = request.rel_url.raw_path, "/lora/"
        if "adapter" in request.match_info:
            target = "/" + target.removeprefix(prefix).partition("/")[2]
        self.path = target
        query = request.rel_url.raw_query_string
        self.target = f"{target}?{query}" if query else target
        dropped = _NOT_SENT if keep_key else _NOT_SENT | _KEYS
        self.headers = CIMultiDict((n, v) for n, v in request.headers.items() if n.lower() not in dropped)
        self.headers.update(id_header())
        self.body = body


class Passthrough:
    """The handlers. ``keep_key``: the client's API key is for the server, as the proxy asks for none."""

    def __init__(self, keep_key: bool) -> None:
        self._keep_key = keep_key

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Any request that the proxy does not answer itself."""
        body = await read_body(request) if request.can_read_body else None
        upstream = Upstream(request, body, self._keep_key)
        proxy = request.app[PROXY]
        if request.method == "POST":
            if upstream.path in TAKING_LORA:
                return await self._generate(request, upstream, parse_object(body or b""))
            if upstream.path in UNDER_ITS_SCALES and (parsed := _object_or_none(body)) is not None:
                return await self._generate(request, upstream, parsed)
        proxy.check_url_adapter(request)
        if upstream.path in ("/health", "/v1/health"):
            proxy.pool.check_ready()
        place = servers_of(proxy.pool.reach()).places.any_up()
        return await relay(request, place, upstream, headers={})

    async def _generate(self, request: web.Request, upstream: Upstream, body: dict[str, Any]) -> web.StreamResponse:
        proxy = request.app[PROXY]
        account = open_account(request, proxy.metrics, upstream.path)
        with account.kept():
            adapters = proxy.resolve(request, body)
            names = proxy.names(adapters)
            headers = {"X-LoRA": adapters.label(names)}
            account.under(tuple(names.values()), headers["X-LoRA"])
            if upstream.path in UNDER_ITS_SCALES and not _selects(request, body, adapters):
                headers = {}  # whatever the server runs it under
            async with proxy.lease(adapters) as (worker, wire):
                answer = await _run(request, servers_of(worker), wire, upstream, body, headers=headers, account=account)
            account.answered(answer)
            return answer


def _object_or_none(body: bytes | None) -> dict[str, Any] | None:
    try:
        return parse_object(body or b"")
    except InvalidRequest:
        return None  # the server says what is wrong with it


def _selects(request: web.Request, body: Mapping[str, Any], adapters: AdapterSet) -> bool:
    """Whether the request itself says what it runs under."""
    said = (body.get("lora"), body.get("adapter_id"), request.match_info.get("adapter"))
    return any(value is not None for value in said) or adapters != BASE


def servers_of(worker: Leased) -> LlamaServers:
    """The llama-servers behind the pool's worker."""
    backend = worker.backend
    assert isinstance(backend, LlamaServers), "these handlers are for llama-server alone"
    return backend


async def _run(
    request: web.Request,
    servers: LlamaServers,
    wire: AdapterSet,
    upstream: Upstream,
    body: Mapping[str, Any],
    *,
    headers: Mapping[str, str],
    account: Account,
) -> web.StreamResponse:
    """Send it to a server that is free for it; where that does not accept the connection, to another."""
    text = upstream.body or b""

    async def send(place: Place) -> web.StreamResponse:
        account.began()
        if upstream.path in TAKING_LORA:
            lora = place.lora(wire)
            upstream.body = text if lora is None else with_member(text, "lora", lora, "lora" in body)
        elif not place.keyed and headers:
            await check_own_scales(place, wire, upstream.path)
        return await relay(request, place, upstream, headers=headers, account=account)

    return await on_a_server(servers, wire, send)


async def on_a_server(
    servers: LlamaServers, wire: AdapterSet, send: Callable[[Place], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """What ``send`` answers with a server that is free for ``wire``; where it raises Unavailable, with another."""
    refused: list[Place] = []
    while True:
        async with servers.places.run(wire, refused) as place:
            try:
                return await send(place)
            except Unavailable:
                if len(refused) + 1 >= len(servers.places.all):
                    raise
                refused.append(place)


async def check_own_scales(place: Place, wire: AdapterSet, path: str) -> None:
    """Raises NotSupported unless the server's own scales are those of ``wire``."""
    scales = {adapter.id: adapter.scale for adapter in await place.client.adapters()} if place.served else {}
    if place.scales(wire) != scales:
        wanted = "adapters" if wire != BASE else "the base model"
        raise NotSupported(
            f"llama-server runs {path} under its own scales, which are {scales} by its ids, so {wanted} cannot be"
            f" chosen there; set them with POST {place.client.url}/lora-adapters, or use /v1/chat/completions"
        )


async def ask(
    place: Place, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
) -> aiohttp.ClientResponse:
    """The answer of the server at ``place``, its body unread, for the caller to release.

    Raises Unavailable where the server did not accept the connection, so that nothing was sent, and WorkerFailed
    where it broke the connection.
    """
    client = place.client
    try:
        return await client.session.request(
            method, URL(client.url + target, encoded=True), data=body, headers=headers, allow_redirects=False
        )
    except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
        message = f"the llama-server at {client.url} does not accept connections; try again later"
        raise Unavailable(message, retry_after=2) from error
    except (aiohttp.ClientError, OSError) as error:
        raise broken(place) from error


async def relay(
    request: web.Request,
    place: Place,
    upstream: Upstream,
    *,
    headers: Mapping[str, str],
    account: Account | None = None,
) -> web.StreamResponse:
    """Send ``upstream`` to the server at ``place`` and copy its answer, with ``headers`` added.

    ``account`` is told what goes by.
    Raises Unavailable where the server did not accept the connection, so that nothing was sent, and WorkerFailed
    where it broke the connection before its answer began. Later than that a stream of events ends with an error
    event, and anything else is cut off.
    """
    answer = await ask(place, upstream.method, upstream.target, upstream.body, upstream.headers)
    try:
        merged = CIMultiDict((n, v) for n, v in answer.headers.items() if n.lower() not in _NOT_COPIED)
        merged.update(headers)
        if "Content-Length" not in answer.headers or request.method == "HEAD":
            return await _copy(request, place, answer, merged, account)
        try:
            data = await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            raise broken(place) from error
        if account is not None and answer.status == 200:
            account.whole(data)
        return web.Response(body=data, status=answer.status, reason=answer.reason, headers=merged)
    finally:
        answer.release()


async def _copy(
    request: web.Request,
    place: Place,
    answer: aiohttp.ClientResponse,
    headers: CIMultiDict[str],
    account: Account | None,
) -> web.StreamResponse:
    """Copy as it comes."""
    response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
    if request.method == "HEAD" and (length := answer.headers.get("Content-Length")):
        response.headers["Content-Length"] = length
    try:
        await response.prepare(request)
        if not await copy_body(request, answer, response, account.chunk if account else _ignore):
            if account is not None:
                account.cut_off("error")
            await _cut_off(request, response, answer, broken(place))
        await response.write_eof()
    except ConnectionResetError:  # writing failed: the client is gone
        if account is not None and not account.outcome:
            account.cut_off("cancelled")  # the caller closes the connection to the server, which then stops
    return response


async def _cut_off(
    request: web.Request, response: web.StreamResponse, answer: aiohttp.ClientResponse, error: ApiError
) -> None:
    """The server broke off its answer: tell the client, which must not take it for the whole."""
    if answer.content_type == "text/event-stream":
        await response.write(b"data: " + json.dumps(error.body()).encode() + b"\n\n")
    elif request.transport is not None:
        request.transport.abort()
        raise ConnectionResetError


def broken(place: Place) -> WorkerFailed:
    """The error of a request whose connection to the server broke."""
    return WorkerFailed(f"the llama-server at {place.client.url} broke the connection while it worked on this request")


def _ignore(chunk: bytes) -> None:
    pass
