"""The endpoints that generate text: find the adapter set, take a lease, forward, copy the answer back."""

from __future__ import annotations

import asyncio
from time import perf_counter

from aiohttp import web

from loraproxy.adapters.sets import AdapterSet
from loraproxy.errors import ApiError
from loraproxy.pool.base import Leased
from loraproxy.proxy.body import dump_json, parse_object, read_body
from loraproxy.proxy.context import PROXY, endpoint
from loraproxy.proxy.forward import Upstream, forward


async def generate(request: web.Request) -> web.StreamResponse:
    """One completion or chat completion, streamed or not."""
    arrived = perf_counter()
    proxy = request.app[PROXY]
    names: dict[int, str] = {}
    outcome = "error"
    try:
        raw = await read_body(request)
        body = parse_object(raw)
        adapters = proxy.resolve(request, body)
        names = proxy.names(adapters)

        async def send(worker: Leased, wire: AdapterSet) -> web.StreamResponse:
            return await forward(
                request,
                proxy.pool,
                worker,
                Upstream("POST", endpoint(request), _wire_body(raw, body, wire)),
                headers={"X-LoRA": adapters.label(names)},
                on_first_bytes=lambda: proxy.metrics.first_token(perf_counter() - arrived),
            )

        answer = await proxy.run(adapters, send)
        outcome = _outcome(answer.status)
        return answer
    except ApiError as error:
        outcome = _outcome(error.status)
        raise
    except asyncio.CancelledError:
        outcome = "cancelled"
        raise
    finally:
        proxy.metrics.count(endpoint(request), tuple(names.values()), outcome)


def _wire_body(raw: bytes, body: dict[str, object], adapters: AdapterSet) -> bytes:
    """The body with ``lora`` in the wire form (absent: the base). As it came, where that is the same."""
    if adapters.is_base:
        if "lora" not in body:
            return raw
        return dump_json({key: value for key, value in body.items() if key != "lora"})
    return dump_json({**body, "lora": adapters.wire()})


def _outcome(status: int) -> str:
    if status < 400:
        return "ok"
    if status < 500:
        return "refused"
    return "unavailable" if status == 503 else "error"
