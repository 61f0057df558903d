"""The endpoints that generate text: find the adapter set, take a lease, forward, copy the answer back."""

from __future__ import annotations

from aiohttp import web

from loraproxy.adapters.sets import AdapterSet
from loraproxy.pool.base import Leased
from loraproxy.proxy.accounting import open_account
from loraproxy.proxy.body import dump_json, parse_object, read_body
from loraproxy.proxy.context import PROXY, endpoint
from loraproxy.proxy.forward import Upstream, forward


async def generate(request: web.Request) -> web.StreamResponse:
    """One completion or chat completion, streamed or not."""
    proxy = request.app[PROXY]
    account = open_account(request, proxy.metrics, endpoint(request))
    with account.kept():
        raw = await read_body(request)
        body = parse_object(raw)
        adapters = proxy.resolve(request, body)
        names = proxy.names(adapters)
        label = adapters.label(names)
        account.under(tuple(names.values()), label)

        async def send(worker: Leased, wire: AdapterSet) -> web.StreamResponse:
            account.began()
            return await forward(
                request,
                proxy.pool,
                worker,
                Upstream("POST", endpoint(request), _wire_body(raw, body, wire)),
                headers={"X-LoRA": label},
                account=account,
            )

        answer = await proxy.run(adapters, send)
        account.answered(answer)
        return answer


def _wire_body(raw: bytes, body: dict[str, object], adapters: AdapterSet) -> bytes:
    """The body with ``lora`` in the wire form (absent: the base). As it came, where that is the same."""
    if adapters.is_base:
        if "lora" not in body:
            return raw
        return dump_json({key: value for key, value in body.items() if key != "lora"})
    return dump_json({**body, "lora": adapters.wire()})
