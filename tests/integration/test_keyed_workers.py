"""Real workers with llama.cpp's own LoRA graph behind the proxy, one adapter set each at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.registry import AdapterRegistry, Source
from loraproxy.adapters.roots import AllowedRoots
from loraproxy.adapters.uploads import UploadFolder
from loraproxy.config import Config, HttpConfig, PoolConfig, WorkerSettings
from loraproxy.metrics import Metrics
from loraproxy.proxy.adapters_api import AdminState
from loraproxy.proxy.app import make_app
from loraproxy.proxy.catalog import Catalog, Checks
from loraproxy.proxy.context import Proxy
from loraproxy.proxy.keyed_workers import graph_workers, keyed_pool
from servers import demo_adapters

PATIENCE = 120
GREEDY = {"temperature": 0, "seed": 1, "cache_prompt": False}
LONG = {**GREEDY, "prompt": "The weather today is", "n_predict": 48, "ignore_eos": True}
SHORT = {**GREEDY, "prompt": "Once upon a time", "n_predict": 12, "ignore_eos": True}


class KeyedProxy:
    """A proxy on a real port, its workers real processes."""

    def __init__(self, model: Path, folder: Path, pool: PoolConfig) -> None:
        config = Config(model=model, pool=pool)
        base = BaseModel.from_gguf(model)
        checks = Checks(base, frozenset({"base"}))
        registry = AdapterRegistry()
        for name, path in demo_adapters().items():
            registry.put(name, path, checks.read(name, path), source=Source.CONFIGURED)
        settings = WorkerSettings(
            model=model, socket=Path("worker.sock"), parallel=4, ctx_size=2048, threads=2, cache_ram_mib=0
        )
        metrics = Metrics(lambda: self.pool.in_flight, lambda: self.pool.restarts)
        self.pool = keyed_pool(config, graph_workers(config, settings, base), registry, metrics)
        self.catalog = Catalog(registry, self.pool, checks, UploadFolder(folder / "uploads"))
        proxy = Proxy(self.catalog, self.pool, metrics, frozenset({"base"}))
        app = make_app(proxy, HttpConfig(), (), AdminState(self.catalog, AllowedRoots([]), 1, {}))
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)

    async def complete(self, lora: str, body: dict[str, Any]) -> str:
        async with self.client.post(self.url + "/completion", json={**body, "lora": lora}) as answer:
            assert answer.status == 200, await answer.text()
            return str((await answer.json())["content"])

    async def stream(self, lora: str, body: dict[str, Any]) -> aiohttp.ClientResponse:
        answer = await self.client.post(self.url + "/completion", json={**body, "lora": lora, "stream": True})
        assert answer.status == 200, await answer.text()
        return answer


@asynccontextmanager
async def running(model: Path, folder: Path, **pool: Any) -> AsyncIterator[KeyedProxy]:
    proxy = KeyedProxy(model, folder, PoolConfig(**pool))
    await proxy.runner.setup()
    await web.TCPSite(proxy.runner, "127.0.0.1", 0).start()
    proxy.url = f"http://127.0.0.1:{proxy.runner.addresses[0][1]}"
    proxy.client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE))
    try:
        await proxy.pool.start()
        yield proxy
    finally:
        await proxy.client.close()
        await proxy.pool.close(10)
        await proxy.catalog.close()
        await proxy.runner.cleanup()


def events(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in body.decode().split("\n") if line.startswith("data: {")]


def said(found: list[dict[str, Any]]) -> str:
    return "".join(event["content"] for event in found)


async def test_a_request_for_another_set_waits_until_the_worker_is_drained_and_neither_sees_the_other(
    model, tmp_path, caplog
):
    caplog.set_level("INFO", logger="loraproxy.pool")
    async with running(model, tmp_path, max_workers=1) as proxy:
        alone = {"pirate": await proxy.complete("pirate", LONG), "robot": await proxy.complete("robot", SHORT)}
        caplog.clear()
        stream = await proxy.stream("pirate", LONG)
        first = await stream.content.readany()
        other = asyncio.create_task(proxy.complete("robot", SHORT))
        found = events(first + await stream.content.read())
        assert said(found) == alone["pirate"]
        assert await other == alone["robot"]
    lines = [record.getMessage() for record in caplog.records if "event=worker_state" in record.getMessage()]
    moves = [" ".join(line.split()[2:5]) for line in lines]
    drained = moves.index("set=pirate=1 from=ready to=draining")
    assert moves[drained : drained + 3] == [
        "set=pirate=1 from=ready to=draining",
        "set=pirate=1 from=draining to=starting",
        "set=robot=1 from=starting to=ready",
    ]


async def test_clients_that_leave_in_the_middle_of_their_streams_do_not_hold_up_a_change(model, tmp_path):
    async with running(model, tmp_path, max_workers=1) as proxy:
        for name in ("pirate", "robot") * 3:
            stream = await proxy.stream(name, {**LONG, "n_predict": 400})
            await stream.content.readany()
            stream.close()
        assert await proxy.complete("bard", SHORT)
        [worker] = proxy.pool.workers()
        assert (worker.adapters, worker.leases, proxy.pool.in_flight) == ("bard=1", 0, 0)
