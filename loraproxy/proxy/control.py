"""The endpoints that generate nothing: health, models, metrics, adapters, and what only passes through."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
from aiohttp import web

from loraproxy.adapters.selectors import parse_lora
from loraproxy.errors import InvalidRequest, NotSupported
from loraproxy.proxy.body import parse_json, read_body
from loraproxy.proxy.context import PROXY, Proxy, endpoint
from loraproxy.proxy.forward import Upstream, forward


async def health(request: web.Request) -> web.Response:
    """200 while a worker takes requests, else 503 with the reason."""
    proxy = request.app[PROXY]
    proxy.check_url_adapter(request)
    proxy.pool.check_ready()
    return web.json_response({"status": "ok"})


async def pass_on(request: web.Request) -> web.StreamResponse:
    """Forward the request to the worker as it is."""
    proxy = request.app[PROXY]
    proxy.check_url_adapter(request)
    body = await read_body(request) if request.method == "POST" else None
    query = f"?{request.query_string}" if request.query_string else ""
    method = "GET" if request.method == "HEAD" else request.method
    upstream = Upstream(method, endpoint(request) + query, body)
    return await forward(request, proxy.pool, proxy.pool.reach(), upstream, headers={})


async def models(request: web.Request) -> web.Response:
    """The worker's model list and, in the same form, one entry for each adapter.

    An adapter's ``id`` is its name, ``parent`` the base model's id (vLLM's word for it), ``aliases`` the
    ``base:adapter`` form; both select it when they are given as ``model``.
    """
    proxy = request.app[PROXY]
    proxy.check_url_adapter(request)
    listing = await fetch_json(proxy, endpoint(request))
    base_data, base_models = listing["data"][0], listing["models"][0]
    for adapter in proxy.registry:
        if adapter.error:
            continue  # nothing can run under it
        alias = f"{base_data['id']}:{adapter.name}"
        listing["data"].append({**base_data, "id": adapter.name, "aliases": [alias], "parent": base_data["id"]})
        listing["models"].append({**base_models, "name": adapter.name, "model": adapter.name})
    return web.json_response(listing)


async def list_adapters(request: web.Request) -> web.Response:
    """llama-server's list of adapters with their default scales; ``name`` is ours."""
    proxy = request.app[PROXY]
    proxy.check_url_adapter(request)
    return web.json_response(
        [
            {
                "id": adapter.id,
                "name": adapter.name,
                "path": str(adapter.path),
                "scale": adapter.default_scale,
                "task_name": "",
                "prompt_prefix": "",
            }
            for adapter in proxy.registry
        ]
    )


async def set_adapters(request: web.Request) -> web.Response:
    """Set the default scales, for requests that arrive from now on; adapters that are not listed get 0."""
    proxy = request.app[PROXY]
    proxy.check_url_adapter(request)
    entries = parse_json(await read_body(request))
    if not isinstance(entries, list):
        raise InvalidRequest("Request body must be an array")  # llama-server's words
    defaults = parse_lora(entries, proxy.registry)
    assert defaults is not None  # a list always means a set
    proxy.registry.set_defaults(defaults)
    return web.json_response({"success": True})


async def metrics(request: web.Request) -> web.Response:
    """The workers' metrics, of those that answer, and the proxy's own."""
    proxy = request.app[PROXY]
    proxy.check_url_adapter(request)
    theirs = await proxy.worker_metrics.text(proxy.pool)
    own = proxy.metrics.render()
    separator = b"" if theirs.endswith(b"\n") or not theirs else b"\n"
    return web.Response(body=theirs + separator + own, headers={"Content-Type": "text/plain; version=0.0.4"})


async def not_supported(request: web.Request) -> web.Response:
    """501: llama-server has this endpoint, this server has not."""
    raise NotSupported(f"{request.method} {endpoint(request)} is not supported by this server")


async def fetch_json(proxy: Proxy, path: str) -> Any:
    """What a worker answers to ``GET path``. Raises Unavailable, WorkerFailed."""
    worker = proxy.pool.reach()
    try:
        async with worker.backend.session.get(worker.backend.base_url + path) as answer:
            return json.loads(await answer.read())
    except (aiohttp.ClientError, ConnectionError) as error:
        raise proxy.pool.broken() from error
