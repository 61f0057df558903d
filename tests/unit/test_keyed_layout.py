"""How a pool of keyed workers is laid out from the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from standin import summary

from gguf_tools import make_tiny_llama
from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.registry import AdapterRegistry, Source
from loraproxy.config import Config, WorkerSettings
from loraproxy.errors import StartFailed
from loraproxy.proxy.keyed_workers import graph_workers, kv_bytes
from loraproxy.proxy.preload import check_names, kept_warm


def registry_of(*names: str) -> AdapterRegistry:
    registry = AdapterRegistry()
    for name in names:
        registry.put(name, Path(name), summary(name, Path(name)), source=Source.CONFIGURED)
    return registry


def test_names_to_be_kept_warm_mean_what_they_mean_when_they_are_asked_for():
    registry = registry_of("pirate", "robot")
    bounds = kept_warm(registry, ["robot", "base", "pirate"])
    assert [[version.name for version in bound.versions] for bound in bounds()] == [["robot"], [], ["pirate"]]
    before = bounds()
    registry.put("robot", Path("robot"), summary("robot", Path("robot"), "other"), source=Source.CONFIGURED)
    assert bounds()[0] != before[0]
    registry.remove("pirate")
    registry.put("robot", Path("robot"), "its file is damaged", source=Source.CONFIGURED)
    assert [bound.versions for bound in bounds()] == [()]


def test_an_unknown_name_to_be_kept_warm_is_told_with_the_nearest():
    with pytest.raises(StartFailed, match=r"--preload: unknown adapter 'pirat'; .*pirate"):
        check_names(["base", "pirat"], registry_of("pirate"))


def settings(base: BaseModel, **more) -> WorkerSettings:
    return WorkerSettings(model=base.path, socket=Path("w.sock"), parallel=2, cache_ram_mib=1, **more)


def test_a_workers_memory_is_its_caches_and_buffers_and_the_file_where_it_is_not_mapped(tmp_path):
    base = BaseModel.from_gguf(make_tiny_llama(tmp_path / "model.gguf"))
    rows = sum(base.tensors[f"blk.{i}.attn_{part}.weight"][0] for i in range(base.n_layer) for part in "kv")
    assert kv_bytes(base, settings(base, ctx_size=100)) == rows * 100 * 2
    assert kv_bytes(base, settings(base)) == rows * 2 * 4096 * 2
    size = base.path.stat().st_size
    mapped = graph_workers(Config(), settings(base, ctx_size=100), base)
    assert mapped.shared_memory == size
    assert mapped.own_memory == rows * 200 + 81 * 1024**2
    read = graph_workers(Config(), settings(base, ctx_size=100, use_mmap=False), base)
    assert (read.shared_memory, read.own_memory) == (0, mapped.own_memory + size)
