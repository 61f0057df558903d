"""``/workers``: the workers there are, and how to have one finish and be replaced."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from loraproxy.errors import NotFound
from loraproxy.pool.base import WorkerInfo
from loraproxy.proxy.context import PROXY


async def list_workers(request: web.Request) -> web.Response:
    """``GET /workers``: all workers, by id."""
    workers = request.app[PROXY].pool.workers()
    return web.json_response({"object": "list", "data": [describe(worker) for worker in workers]})


async def drain_worker(request: web.Request) -> web.Response:
    """``POST /workers/{id}/drain``: the worker finishes the requests it has and ends. No request is refused for it.

    Answers at once, 202 with the worker as it is then. One that runs one set at a time takes no new requests from now
    on, and another takes its place when it is wanted; one that runs any sets takes them until another is ready.
    """
    text = request.match_info["id"]
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise NotFound(f"there is no worker {text[:40]!r}; GET /workers lists their ids")
    worker = request.app[PROXY].pool.drain_worker(int(text))
    return web.json_response(describe(worker), status=202)


def describe(worker: WorkerInfo) -> dict[str, Any]:
    """``worker`` in the API's form."""
    return {
        "object": "worker",
        "id": worker.id,
        "state": worker.state.value,
        "lora": worker.adapters,
        "leases": worker.leases,
        "waiting": worker.waiting,
        "since": worker.since,
        "pid": worker.pid,
        "restarts": worker.restarts,
        "last_error": worker.last_error or None,
        "memory": worker.memory,
    }


HANDLERS = {
    ("GET", "/workers"): list_workers,
    ("POST", "/workers/{id}/drain"): drain_worker,
}
