"""Laying out a pool of workers that run one adapter set at a time, and what workers of either kind take."""

from __future__ import annotations

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.registry import AdapterRegistry
from loraproxy.backends.graph_worker import GraphWorker
from loraproxy.config import Config, EngineConfig, WorkerSettings
from loraproxy.metrics import Metrics
from loraproxy.pool.fleet import WorkerKind
from loraproxy.pool.keyed import KeyedPool
from loraproxy.pool.placement import Limits
from loraproxy.proxy.preload import kept_warm

_DEFAULT_CONTEXT = 4096
"""Tokens of a slot where the configuration does not say; models with a shorter context have fewer."""
_BUFFERS = 80 * 1024**2
"""What a worker takes beside its weights, its KV cache and its prompt cache: the interpreter, compute buffers, in
bytes."""
_F16 = 2
"""Bytes of an element of the KV cache."""


def keyed_pool(config: Config, kind: WorkerKind, registry: AdapterRegistry, metrics: Metrics) -> KeyedPool:
    """The pool that ``config.pool`` describes."""
    pool = config.pool
    return KeyedPool(
        kind,
        metrics,
        limits=Limits(pool.max_workers, pool.memory_budget, pool.idle_timeout, config.http.max_queue),
        preload=kept_warm(registry, pool.preload) if pool.preload else None,
    )


def graph_workers(config: Config, settings: WorkerSettings, base: BaseModel) -> WorkerKind:
    """Embedded workers with llama.cpp's own LoRA graph, which share the base file's pages where it is mapped."""
    size = base.path.stat().st_size
    own = kv_bytes(base, settings) + settings.cache_ram_mib * 1024**2 + _BUFFERS
    return WorkerKind(
        make=lambda: GraphWorker(settings, ignore_unsupported=config.ignore_unsupported),
        slots=settings.parallel,
        shared_memory=size if settings.use_mmap else 0,
        own_memory=own if settings.use_mmap else own + size,
    )


def shares_pages(engine: EngineConfig) -> bool:
    """Whether processes share the base model's weights, so that a second one takes little beside them."""
    return engine.mmap and not engine.gpu_layers and not engine.repack


def two_fit(config: Config, settings: WorkerSettings, base: BaseModel) -> bool:
    """Whether a second worker has room beside one that is drained: by ``pool.memory_budget``, where there is one."""
    if not shares_pages(config.engine):
        return False
    kind = graph_workers(config, settings, base)
    need = kind.shared_memory + 2 * (kind.own_memory + config.adapter_memory)
    return not config.pool.memory_budget or need <= config.pool.memory_budget


def kv_bytes(base: BaseModel, settings: WorkerSettings) -> int:
    """An estimate of the KV cache in f16: the rows of each layer's K and V projections for every token of context.

    0 for layers without such (recurrent ones). Where Q, K and V are one matrix, K and V are what its rows have beyond
    the model's width.
    """
    tokens = settings.ctx_size or settings.parallel * _DEFAULT_CONTEXT
    rows = 0
    for layer in range(base.n_layer):
        separate = [base.tensors.get(f"blk.{layer}.attn_{part}.weight") for part in ("k", "v")]
        fused = base.tensors.get(f"blk.{layer}.attn_qkv.weight")
        if all(separate):
            rows += sum(shape[0] for shape in separate if shape)
        elif fused is not None:
            rows += max(fused[0] - fused[-1], 0)
    return rows * tokens * _F16
