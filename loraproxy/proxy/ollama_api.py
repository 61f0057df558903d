"""Ollama's own API, for its clients, over every kind of worker that speaks llama-server's.

A model of Ollama is here the base model or an adapter on it: ``smollm2``, ``pirate``, ``smollm2:pirate``, each also
with ``:latest``. The ``lora`` field and ``/lora/{adapter}/api/…`` select as everywhere; an unknown model is Ollama's
404. What manages Ollama's own store (create, pull, …) is answered with 501: adapters come through ``/adapters``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from time import perf_counter_ns
from typing import Any

import aiohttp
from aiohttp import web

from loraproxy.adapters.sets import AdapterSet
from loraproxy.backends.llama_server import LlamaServers
from loraproxy.backends.llama_server_places import Place
from loraproxy.errors import NotSupported
from loraproxy.logs import id_header
from loraproxy.pool.base import Leased
from loraproxy.proxy.accounting import account_of, open_account
from loraproxy.proxy.body import dump_json, parse_object, read_body
from loraproxy.proxy.context import PROXY, endpoint
from loraproxy.proxy.forward import Upstream, send
from loraproxy.proxy.ollama_answers import VERSION, OllamaAnswer, embed_answer, ps_answer, show_answer, tags_answer
from loraproxy.proxy.ollama_listing import base_facts, check_known, named_adapter, template
from loraproxy.proxy.ollama_relay import Broken, relay, relay_whole
from loraproxy.proxy.ollama_wire import Call, asks_for_nothing, chat_call, embed_call, generate_call, model_of
from loraproxy.proxy.passthrough import UNDER_ITS_SCALES, ask, broken, check_own_scales, on_a_server

Relay = Callable[[aiohttp.ClientResponse, Broken, Mapping[str, str]], Awaitable[web.StreamResponse]]
"""Sends a worker's answer to the client, with the headers given."""


async def generate(request: web.Request) -> web.StreamResponse:
    """``POST /api/generate``."""
    return await _generate(request, generate_call, "response")


async def chat(request: web.Request) -> web.StreamResponse:
    """``POST /api/chat``."""
    return await _generate(request, chat_call, "message")


async def embed(request: web.Request) -> web.StreamResponse:
    """``POST /api/embed``, where the worker embeds."""
    began = perf_counter_ns()
    body = parse_object(await read_body(request))

    async def answer(upstream: aiohttp.ClientResponse, fault: Broken, headers: Mapping[str, str]) -> web.StreamResponse:
        def shape(value: Mapping[str, Any]) -> dict[str, Any]:
            return embed_answer(_name_of(body), value, perf_counter_ns() - began)

        return await relay_whole(upstream, shape, broken=fault, headers=headers, account=account_of(request))

    return await _run(request, body, lambda: embed_call(body), answer)


async def tags(request: web.Request) -> web.Response:
    """``GET /api/tags``: the base model and the adapters."""
    proxy = request.app[PROXY]
    proxy.check_url_adapter(request)
    base = await base_facts(proxy)
    return web.json_response(
        tags_answer([base.facts, *(base.adapter(adapter) for adapter in proxy.registry if not adapter.error)])
    )


async def running(request: web.Request) -> web.Response:
    """``GET /api/ps``: the base model and the adapters that are loaded."""
    proxy = request.app[PROXY]
    proxy.check_url_adapter(request)
    base = await base_facts(proxy)
    residency = proxy.pool.residency
    loaded = [a for a in proxy.registry if a.version is not None and residency.state(a.version) == "resident"]
    return web.json_response(ps_answer([base.facts, *map(base.adapter, loaded)], base.context_length))


async def show(request: web.Request) -> web.Response:
    """``POST /api/show``."""
    proxy = request.app[PROXY]
    proxy.check_url_adapter(request)
    body = parse_object(await read_body(request))
    model = model_of(body)
    check_known(proxy, _name_of(body), model)
    base, adapter = await base_facts(proxy), named_adapter(proxy, model)
    return web.json_response(
        show_answer(
            base.facts if adapter is None else base.adapter(adapter),
            template=await template(proxy),
            model_info=base.model_info(),
        )
    )


async def version(request: web.Request) -> web.Response:
    """``GET /api/version``."""
    return web.json_response({"version": VERSION})


async def alive(request: web.Request) -> web.Response:
    """``HEAD /``: how Ollama's command line looks whether there is a server."""
    return web.Response()


async def not_supported(request: web.Request) -> web.Response:
    """501: what manages Ollama's own store."""
    raise NotSupported(
        f"{request.method} {endpoint(request)} is not supported by this server; adapters are registered with"
        " PUT /adapters/NAME"
    )


HANDLERS = {
    ("POST", "/api/generate"): generate,
    ("POST", "/api/chat"): chat,
    ("POST", "/api/embed"): embed,
    ("GET", "/api/tags"): tags,
    ("GET", "/api/ps"): running,
    ("POST", "/api/show"): show,
    ("GET", "/api/version"): version,
    ("POST", "/api/create"): not_supported,
    ("POST", "/api/pull"): not_supported,
    ("POST", "/api/push"): not_supported,
    ("POST", "/api/copy"): not_supported,
    ("DELETE", "/api/delete"): not_supported,
    ("POST", "/api/embeddings"): not_supported,
    ("HEAD", "/api/blobs/{digest}"): not_supported,
    ("POST", "/api/blobs/{digest}"): not_supported,
}
"""Method and path to handler."""


async def _generate(
    request: web.Request, make: Callable[[Mapping[str, Any]], Call], text_field: str
) -> web.StreamResponse:
    body = parse_object(await read_body(request))
    answer = OllamaAnswer(_name_of(body), text_field)

    async def answer_with(
        upstream: aiohttp.ClientResponse, fault: Broken, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        return await relay(request, upstream, answer, broken=fault, headers=headers)

    return await _run(request, body, lambda: make(body), answer_with, answer)


async def _run(
    request: web.Request,
    body: Mapping[str, Any],
    make: Callable[[], Call],
    answer: Relay,
    unasked: OllamaAnswer | None = None,
) -> web.StreamResponse:
    """Ask a worker for what ``make`` makes of the body; ``unasked`` answers a request that only loads a model."""
    proxy = request.app[PROXY]
    account = open_account(request, proxy.metrics, endpoint(request))
    with account.kept():
        model = model_of(body)
        check_known(proxy, _name_of(body), model)
        adapters = proxy.resolve(request, {**body, "model": model})
        names = proxy.names(adapters)
        headers = {"X-LoRA": adapters.label(names)}
        account.under(tuple(names.values()), headers["X-LoRA"])
        call = make()
        if unasked is not None and (reason := asks_for_nothing(body)):
            response: web.StreamResponse = web.json_response(unasked.nothing(reason), headers=headers)
            account.answered(response)
            return response

        async def on_worker(worker: Leased, wire: AdapterSet) -> web.StreamResponse:
            if isinstance(worker.backend, LlamaServers):

                async def on_place(place: Place) -> web.StreamResponse:
                    account.began()
                    return await _on_llama_server(place, wire, call, answer, headers)

                return await on_a_server(worker.backend, wire, on_place)
            account.began()
            upstream = await send(proxy.pool, worker, Upstream("POST", call.path, _wire_body(call, wire)))
            try:
                return await answer(upstream, proxy.pool.broken, headers)
            finally:
                upstream.release()  # closes the connection unless the answer was read to its end

        response = await proxy.run(adapters, on_worker)
        account.answered(response)
        return response


async def _on_llama_server(
    place: Place, wire: AdapterSet, call: Call, answer: Relay, headers: Mapping[str, str]
) -> web.StreamResponse:
    if call.path in UNDER_ITS_SCALES and not place.keyed:
        await check_own_scales(place, wire, call.path)
    lora = None if call.path in UNDER_ITS_SCALES else place.lora(wire)
    body = {key: value for key, value in call.body.items() if key != "lora"}
    upstream = await ask(
        place,
        "POST",
        call.path,
        dump_json(body if lora is None else {**body, "lora": lora}),
        {"Content-Type": "application/json", **id_header()},
    )
    try:
        return await answer(upstream, lambda: broken(place), headers)
    finally:
        upstream.release()


def _wire_body(call: Call, wire: AdapterSet) -> bytes:
    body = {key: value for key, value in call.body.items() if key != "lora"}
    return dump_json(body if wire.is_base else {**body, "lora": wire.wire()})


def _name_of(body: Mapping[str, Any]) -> str:
    """The model as the client wrote it."""
    return str(body.get("model") or body.get("name") or "")
