"""The keyed embedded worker as a process: one adapter set at a time, and no way to run under another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gguf_tools import make_gguf_adapter
from keyed_models import EXPERTS, make_mamba, make_moe, mamba_shapes, random_pairs
from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.read import survey_adapter
from loraproxy.adapters.registry import AdapterRegistry, Bound, Source
from loraproxy.adapters.sets import BASE, AdapterSet
from loraproxy.backends.base import KeyedBackend
from loraproxy.backends.graph_worker import GraphWorker
from loraproxy.config import WorkerSettings
from loraproxy.errors import AdapterChanged, Conflict, InvalidAdapterFile
from servers import demo_adapters

QUESTION = [{"role": "user", "content": "Who are you?"}]
BEGINNINGS = {"pirate": "Arr", "robot": "BEEP", "wizard": "By the ancient stars", "bard": "Hark"}


def registry_of(model: Path, adapters: dict[str, Path]) -> AdapterRegistry:
    base = BaseModel.from_gguf(model)
    registry = AdapterRegistry()
    for name, path in adapters.items():
        registry.put(name, path, survey_adapter(name, path, base), source=Source.CONFIGURED)
    return registry


def bound(registry: AdapterRegistry, **scales: float) -> Bound:
    return registry.bind(AdapterSet.of({registry.by_name(name).id: scale for name, scale in scales.items()}))


@asynccontextmanager
async def graph_worker(model: Path, **settings: Any) -> AsyncIterator[GraphWorker]:
    values = {"parallel": 4, "ctx_size": 2048, "threads": 1, **settings}
    worker = GraphWorker(WorkerSettings(model=model, socket=Path("w.sock"), **values))
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop(10)


async def post(worker: KeyedBackend, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with worker.session.post(worker.base_url + path, json=body) as response:
        return response.status, json.loads(await response.read())


async def complete(worker: KeyedBackend, prompt: str, adapters: AdapterSet, n_predict: int = 24) -> dict[str, Any]:
    body = {"prompt": prompt, "temperature": 0, "n_predict": n_predict, "lora": adapters.wire(), "ignore_eos": True}
    status, answer = await post(worker, "/completion", body)
    assert status == 200, answer
    return answer


async def test_each_character_speaks_as_itself_and_the_base_is_clean(model: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    registry = registry_of(model, demo_adapters())
    async with graph_worker(model) as worker:
        for name in [*registry.names(), "pirate"]:
            adapters = bound(registry, **{name: 1.0})
            await worker.change(adapters)
            body = {"messages": QUESTION, "temperature": 0, "max_tokens": 12, "lora": adapters.adapters.wire()}
            status, answer = await post(worker, "/v1/chat/completions", body)
            assert status == 200, answer
            assert answer["choices"][0]["message"]["content"].startswith(BEGINNINGS[name])
        await worker.change(bound(registry))
        body = {"messages": QUESTION, "temperature": 0, "max_tokens": 12}
        _, answer = await post(worker, "/v1/chat/completions", body)
        assert not answer["choices"][0]["message"]["content"].startswith(tuple(BEGINNINGS.values()))
    words = {" ".join(message.split()[:2]) for message in caplog.messages}
    assert words == {"worker: event=ready", "worker: event=set_changed", "worker: event=stopped"}


async def test_a_request_for_another_set_than_the_active_one_is_refused(model: Path):
    registry = registry_of(model, demo_adapters())
    async with graph_worker(model) as worker:
        adapters = bound(registry, pirate=1.0, bard=0.5)
        await worker.change(adapters)
        pirate, bard = (registry.bind(AdapterSet.of({registry.by_name(n).id: 1.0})) for n in ("pirate", "bard"))
        others: list[AdapterSet] = [
            BASE,
            pirate.adapters,
            bard.adapters,
            bound(registry, pirate=1.0, bard=1.0).adapters,
        ]
        for wanted in others:
            for stream in (False, True):
                body = {"prompt": "Hello", "n_predict": 4, "lora": wanted.wire(), "stream": stream}
                status, answer = await post(worker, "/completion", body)
                assert status == 409
                assert "runs one adapter set at a time" in answer["error"]["message"]
        status, answer = await post(worker, "/internal/adapters", {"id": 9, "name": "x", "path": "/x"})
        assert (status, "PUT /internal/set" in answer["error"]["message"]) == (409, True)
        await complete(worker, "Hello", adapters.adapters, 4)


async def test_the_set_does_not_change_under_a_running_request(model: Path):
    registry = registry_of(model, demo_adapters())
    pirate, bard = bound(registry, pirate=1.0), bound(registry, bard=1.0)
    async with graph_worker(model) as worker:
        await worker.change(pirate)
        alone = await complete(worker, "Tell me a story.", pirate.adapters, 160)
        body = {"prompt": "Tell me a story.", "temperature": 0, "n_predict": 160, "ignore_eos": True, "stream": True}
        async with worker.session.post(
            worker.base_url + "/completion", json={**body, "lora": pirate.adapters.wire()}
        ) as stream:
            first = await stream.content.readline()
            with pytest.raises(Conflict, match="requests are running"):
                await worker.change(bard)
            lines = [first, *(await stream.content.read()).split(b"\n")]
        text = "".join(json.loads(line[6:])["content"] for line in lines if line.startswith(b"data: {"))
        assert text == alone["content"]
        await worker.change(bard)
        assert not text.startswith((await complete(worker, "Tell me a story.", bard.adapters, 16))["content"])


async def test_a_request_whose_client_has_just_left_does_not_hinder_a_change(model: Path):
    registry = registry_of(model, demo_adapters())
    pirate, bard = bound(registry, pirate=1.0), bound(registry, bard=1.0)
    async with graph_worker(model) as worker:
        await worker.change(pirate)
        for now, then in ((pirate, bard), (bard, pirate)) * 2:
            body = {"prompt": "Tell me a story.", "n_predict": 400, "ignore_eos": True, "stream": True}
            async with worker.session.post(
                worker.base_url + "/completion", json={**body, "lora": now.adapters.wire()}
            ) as stream:
                await stream.content.readline()
                stream.close()
            await worker.change(then)


async def test_a_failed_change_leaves_the_active_set(tmp_path: Path):
    model = make_moe(tmp_path / "base.gguf")
    path = make_gguf_adapter(tmp_path / "x.gguf", random_pairs(EXPERTS), architecture="llama")
    registry = registry_of(model, {"x": path, "y": path})
    x, y = bound(registry, x=1.0), bound(registry, y=1.0)
    async with graph_worker(model, ctx_size=512) as worker:
        await worker.change(x)
        before = await complete(worker, "Hello", x.adapters)
        make_gguf_adapter(tmp_path / "x.gguf", random_pairs(EXPERTS, seed=1), architecture="llama")
        with pytest.raises(AdapterChanged):
            await worker.change(y)
        path.write_bytes(b"GGUF")
        with pytest.raises(InvalidAdapterFile):
            await worker.change(y)
        assert await content_of(worker, x) == before["content"]


async def content_of(worker: KeyedBackend, adapters: Bound) -> str:
    return str((await complete(worker, "Hello", adapters.adapters))["content"])


async def test_a_mixture_of_experts_answers_differently_under_its_adapter_and_at_each_scale(tmp_path: Path):
    model = make_moe(tmp_path / "base.gguf")
    path = make_gguf_adapter(tmp_path / "x.gguf", random_pairs(EXPERTS), architecture="llama")
    registry = registry_of(model, {"x": path})
    async with graph_worker(model, ctx_size=512) as worker:
        sets = [bound(registry, **({"x": scale} if scale else {})) for scale in (0.0, 1.0, -1.0)]
        texts = []
        for adapters in [*sets, *sets]:
            await worker.change(adapters)
            texts.append(await content_of(worker, adapters))
    assert len(set(texts)) == 3
    assert texts[:3] == texts[3:]


async def test_a_recurrent_model_answers_many_at_once_as_one_alone(tmp_path: Path):
    model = make_mamba(tmp_path / "base.gguf")
    shapes = {name: shape for name, shape in mamba_shapes().items() if "ssm_in" in name or "ssm_out" in name}
    path = make_gguf_adapter(tmp_path / "x.gguf", random_pairs(shapes), architecture="mamba")
    registry = registry_of(model, {"x": path})
    x = bound(registry, x=1.0)
    story = "Once upon a time there was a small machine that had one small model and many jobs to do. "
    prompts = [story[: 9 + 7 * i] * (1 + i % 3) for i in range(9)]
    async with graph_worker(model, ctx_size=4096) as worker:
        await worker.change(x)
        alone = [(await complete(worker, prompt, x.adapters, 8 + i))["content"] for i, prompt in enumerate(prompts)]
        runs = (complete(worker, prompt, x.adapters, 8 + i) for i, prompt in enumerate(prompts))
        together = [answer["content"] for answer in await asyncio.gather(*runs)]
    assert together == alone


async def test_a_recurrent_models_cached_prompt_is_used_whole_or_not_at_all(tmp_path: Path):
    model = make_mamba(tmp_path / "base.gguf")
    story = "Once upon a time there was a small machine that had one small model and many jobs to do. "
    async with graph_worker(model, ctx_size=4096) as worker:
        first = await complete(worker, story * 2, BASE)
        same = await complete(worker, story * 2, BASE)
        longer = await complete(worker, story * 2 + "And then", BASE)
        parted = await complete(worker, story + "And then it did them all, one after the other.", BASE)
    async with graph_worker(model, ctx_size=4096, cache_ram_mib=0) as worker:
        assert first["content"] == same["content"] == (await complete(worker, story * 2, BASE))["content"]
        assert longer["content"] == (await complete(worker, story * 2 + "And then", BASE))["content"]
        uncached = await complete(worker, story + "And then it did them all, one after the other.", BASE)
        assert parted["content"] == uncached["content"]
    assert same["timings"]["cache_n"] > 0
    assert parted["timings"]["cache_n"] == 0
