"""Laying out the proxy in front of llama-servers: which adapters there are, and who serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from loraproxy.adapters.registry import AdapterRegistry
from loraproxy.backends.llama_server import UrlServers
from loraproxy.backends.llama_server_process import LlamaServerSettings, find_binary
from loraproxy.backends.llama_server_spawned import SpawnedServers
from loraproxy.config import Config, WorkerAdapter
from loraproxy.errors import StartFailed
from loraproxy.proxy.served import ServedAdapters, look


def spawned(config: Config, model: Path, registry: AdapterRegistry) -> Callable[[], SpawnedServers]:
    """What makes the backend that starts a llama-server for the adapters in ``registry``. Raises StartFailed."""
    assert config.backend.bin is not None
    engine = config.engine
    settings = LlamaServerSettings(
        binary=find_binary(config.backend.bin),
        model=model,
        alias=config.aliases[0] if config.aliases else "",
        parallel=engine.parallel,
        ctx_size=engine.ctx_size,
        threads=engine.threads,
        threads_batch=engine.threads_batch,
        batch_size=engine.batch_size,
        ubatch_size=engine.ubatch_size,
        gpu_layers=engine.gpu_layers,
        cache_ram_mib=-(-engine.cache_ram // 1024**2),
        mmap=engine.mmap,
        repack=engine.repack,
        arguments=config.backend.args,
    )

    def wanted() -> Sequence[WorkerAdapter]:
        return [
            WorkerAdapter(
                id=version.wire_id,
                name=version.name,
                path=version.path,
                digest=version.summary.digest,
                ignore_unsupported=config.ignore_unsupported,
            )
            for version in (adapter.version for adapter in registry)
            if version is not None
        ]

    return lambda: SpawnedServers(settings, wanted)


def at_urls(config: Config, registry: AdapterRegistry) -> tuple[ServedAdapters, Callable[[], UrlServers]]:
    """Ask the servers what they have, register it, and give what makes the backend. Raises StartFailed."""
    backend = config.backend
    if config.adapters_dir is not None:
        raise StartFailed("--adapters-dir needs a llama-server that is started here (--backend-bin), not one at a URL")
    served, names = asyncio.run(look(backend.urls, backend.api_key))
    adapters = ServedAdapters(backend.urls, names | frozenset(config.aliases), served)
    adapters.register(registry, config)
    return adapters, lambda: UrlServers(backend.urls, backend.api_key, on_adapters=adapters.update)
