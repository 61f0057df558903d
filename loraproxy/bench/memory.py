"""What the worker process holds in memory, beside what it must hold."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from loraproxy.adapters.base_model import BaseModel
from loraproxy.errors import StartFailed

ALLOWANCE_MIB = 150
"""For Python, its libraries and the engine's own state."""
_MIB = 1024**2
_KV_BYTES = 2
"""The KV cache is f16."""
_BUFFER = re.compile(r"(compute|output) buffer size = +([\d.]+) MiB")


@dataclass(frozen=True)
class Memory:
    """The worker's resident memory and its parts, in MiB; ``pss`` counts shared pages in proportion."""

    rss: float
    pss: float
    base_file: float
    kv_cache: float
    compute: float
    adapters: float

    @property
    def needed(self) -> float:
        """Mapped base file, KV cache, compute and output buffers, and adapters as they are kept."""
        return self.base_file + self.kv_cache + self.compute + self.adapters

    @property
    def overhead(self) -> float:
        """What it holds beyond that."""
        return self.rss - self.needed


def measure_memory(pid: int, log: Path, base: BaseModel, ctx_size: int, adapter_bytes: int) -> Memory | None:
    """The memory of the worker that process ``pid`` started and whose output is in ``log``; None without Linux's /proc.

    All cells of the KV cache count, used or not: llama.cpp clears them at the start.
    """
    worker = worker_of(pid)
    if worker is None:
        return None
    resident = _smaps_rollup(worker)
    return Memory(
        rss=resident["Rss"] / 1024,
        pss=resident["Pss"] / 1024,
        base_file=base.path.stat().st_size / _MIB,
        kv_cache=_kv_bytes(base, ctx_size) / _MIB,
        compute=_buffers_mib(log),
        adapters=adapter_bytes / _MIB,
    )


def worker_of(pid: int) -> int | None:
    """The process id of the worker among the children of ``pid``."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    for child in children:
        if b"loraproxy.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    return None


def proportional_mib(pid: int) -> float:
    """The proportional set size of a process, in MiB: shared pages count in parts. Raises StartFailed without /proc."""
    try:
        return _smaps_rollup(pid)["Pss"] / 1024
    except OSError as error:
        raise StartFailed(f"the memory of process {pid} cannot be looked up here: {error}") from error


def _smaps_rollup(pid: int) -> dict[str, int]:
    """The fields of ``/proc/PID/smaps_rollup`` in KiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) for line in lines}


def _kv_bytes(base: BaseModel, ctx_size: int) -> int:
    width = 0
    for layer in range(base.n_layer):
        for name in ("attn_k", "attn_v"):
            shape = base.shape_of(f"blk.{layer}.{name}.weight")
            width += shape[0] if shape else 0
    return width * ctx_size * _KV_BYTES


def _buffers_mib(log: Path) -> float:
    """The compute and output buffers that llama.cpp reported last."""
    found = dict(_BUFFER.findall(log.read_text(errors="replace")))
    return sum(float(size) for size in found.values())
