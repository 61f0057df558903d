"""Ollama's own API in front of an Ollama server: requests go through as they are, under the models of their sets.

So everything that the server knows works: ``num_ctx``, ``keep_alive``, images, tools, ``context``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp import web

from loraproxy.adapters.sets import AdapterSet
from loraproxy.pool.base import Leased
from loraproxy.proxy.accounting import Tokens, account_of, open_account
from loraproxy.proxy.body import dump_json, parse_object, read_body
from loraproxy.proxy.context import PROXY, endpoint
from loraproxy.proxy.forward import Upstream, send
from loraproxy.proxy.ollama_answers import NDJSON, error_body
from loraproxy.proxy.ollama_listing import base_facts, check_known, named_adapter
from loraproxy.proxy.ollama_relay import Broken, next_bytes, relay_whole
from loraproxy.proxy.ollama_wire import model_of


async def run(request: web.Request) -> web.StreamResponse:
    """``POST /api/generate``, ``/api/chat`` and ``/api/embed``."""
    proxy = request.app[PROXY]
    account = open_account(request, proxy.metrics, endpoint(request))
    with account.kept():
        body = parse_object(await read_body(request))
        model, name = model_of(body), str(body.get("model") or body.get("name"))
        check_known(proxy, name, model)
        adapters = proxy.resolve(request, {**body, "model": model})
        names = proxy.names(adapters)
        headers = {"X-LoRA": adapters.label(names)}
        account.under(tuple(names.values()), headers["X-LoRA"])

        async def on_worker(worker: Leased, wire: AdapterSet) -> web.StreamResponse:
            account.began()
            asked = dump_json({**body, "model": name, "lora": wire.wire()})
            upstream = await send(proxy.pool, worker, Upstream("POST", endpoint(request), asked))
            try:
                return await _relay(request, upstream, broken=proxy.pool.broken, headers=headers)
            finally:
                upstream.release()  # closes the connection unless the answer was read to its end

        response = await proxy.run(adapters, on_worker)
        account.answered(response)
        return response


async def show(request: web.Request) -> web.Response:
    """``POST /api/show``: what the server says of the base model; of an adapter, with its parent named."""
    proxy = request.app[PROXY]
    proxy.check_url_adapter(request)
    body = parse_object(await read_body(request))
    model = model_of(body)
    check_known(proxy, str(body.get("model") or body.get("name")), model)
    base, adapter = await base_facts(proxy), named_adapter(proxy, model)
    upstream = await send(proxy.pool, proxy.pool.reach(), Upstream("POST", "/api/show", dump_json(body)))

    def shape(shown: Mapping[str, Any]) -> Mapping[str, Any]:
        if adapter is None:
            return shown
        details = {**(shown.get("details") or {}), "parent_model": base.facts.name}
        return {**shown, "modelfile": f"FROM {base.facts.name}\n", "details": details}

    try:
        return await relay_whole(upstream, shape, broken=proxy.pool.broken, headers={})
    finally:
        upstream.release()


async def _relay(
    request: web.Request, upstream: aiohttp.ClientResponse, *, broken: Broken, headers: Mapping[str, str]
) -> web.StreamResponse:
    """Send the answer, with ``headers`` added. One that breaks off ends with a line that says so, or raises."""
    if upstream.status != 200 or upstream.content_type != NDJSON:
        return await relay_whole(upstream, lambda answer: _counted(request, answer), broken=broken, headers=headers)
    account = account_of(request)
    response = web.StreamResponse(headers={**headers, "Content-Type": NDJSON})
    pending, last = b"", b""
    try:
        await response.prepare(request)
        while chunk := await next_bytes(upstream):
            if account is not None:
                account.chunk(chunk)
            *lines, pending = (pending + chunk).split(b"\n")
            last = lines[-1] if lines else last
            await response.write(chunk)
        end = json.loads(last or b"{}")
        _counted(request, end)
        if end.get("done") is not True:
            if account is not None:
                account.cut_off("error")
            if "error" not in end:
                await response.write(dump_json(error_body(broken())) + b"\n")
        await response.write_eof()
    except ConnectionResetError:  # writing failed: the client is gone
        if account is not None:
            account.cut_off("cancelled")
    return response


def _counted(request: web.Request, answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """``answer``, its tokens noted for the metrics."""
    if (account := account_of(request)) is not None:
        account.counted(Tokens(answer.get("prompt_eval_count") or 0, 0, answer.get("eval_count") or 0))
    return answer
