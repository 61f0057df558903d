"""``loraproxy bench keyed``: what several keyed embedded workers on one base model hold in memory together."""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.read import survey_adapter
from loraproxy.adapters.registry import AdapterRegistry, Bound, Source
from loraproxy.adapters.sets import AdapterSet
from loraproxy.backends.graph_worker import GraphWorker
from loraproxy.bench.machine import describe_machine, usable_cpus
from loraproxy.bench.memory import proportional_mib
from loraproxy.bench.random_adapters import write_random_adapters
from loraproxy.bench.report import as_markdown, as_text
from loraproxy.bench.scenarios import prompt
from loraproxy.config import WorkerSettings
from loraproxy.demonstration import demo_model
from loraproxy.errors import StartFailed

ALLOWANCE_MIB = 80
"""For each worker: Python, its libraries, the vocabulary and the engine's own state."""
_MIB = 1024**2
_STOP_SECONDS = 10
_WORKER_LOG = "loraproxy.backends.embedded"
_BUFFER = re.compile(r"(KV|compute|output|LoRA|RS) buffer size = +([\d.]+) MiB")
"""What llama.cpp says that it allocates."""


@dataclass(frozen=True)
class WorkerMemory:
    """One worker's memory in MiB: its proportional set size, and what llama.cpp allocated in it."""

    pss: float
    kv_cache: float
    buffers: float
    """Compute and output buffers, and the adapter's weights."""


@dataclass(frozen=True)
class Footprint:
    """All workers' memory together, in MiB."""

    base_file: float
    workers: tuple[WorkerMemory, ...]

    @property
    def total(self) -> float:
        """The sum of the proportional set sizes."""
        return sum(worker.pss for worker in self.workers)

    @property
    def needed(self) -> float:
        """The base file once, and every worker's KV cache and buffers."""
        return self.base_file + sum(worker.kv_cache + worker.buffers for worker in self.workers)

    @property
    def overhead(self) -> float:
        """What a worker holds beyond that, on average."""
        return (self.total - self.needed) / len(self.workers)

    def rows(self) -> list[list[str]]:
        """A table, its headings first."""
        share = self.base_file / len(self.workers)
        rows = [["MiB", "proportional set size", "base file", "KV cache", "buffers and adapter", "the rest"]]
        for number, worker in enumerate(self.workers, 1):
            rest = worker.pss - share - worker.kv_cache - worker.buffers
            values = (worker.pss, share, worker.kv_cache, worker.buffers, rest)
            rows.append([f"worker {number}", *(f"{value:.1f}" for value in values)])
        kv, buffers = (sum(getattr(w, name) for w in self.workers) for name in ("kv_cache", "buffers"))
        values = (self.total, self.base_file, kv, buffers, self.total - self.needed)
        return [*rows, ["together", *(f"{value:.1f}" for value in values)]]


def main(arguments: Sequence[str]) -> int:
    """Measure, print a table and the goal, write both; the exit code is 0. Raises StartFailed."""
    options = _parser().parse_args(arguments)
    folder: Path = options.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="loraproxy-bench-") as scratch:
        found = asyncio.run(_measure(options, Path(scratch), folder / "keyed.log"))
    limit = found.needed + ALLOWANCE_MIB * options.workers
    goal = (
        f"{options.workers} keyed workers together: {found.total:.0f} MiB; the base file once and for each worker KV"
        f" cache, buffers, adapter and {ALLOWANCE_MIB} MiB would be {limit:.0f} MiB:"
        f" {'met' if found.total <= limit else 'missed'}."
    )
    print("\n" + as_text(found.rows()) + "\n\n" + goal)
    lines = [*(f"- {line}" for line in describe_machine()), "", as_markdown(found.rows()), "", goal]
    (folder / "keyed.md").write_text("\n".join(lines) + "\n")
    print(f"\nWritten: {folder / 'keyed.md'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="loraproxy bench keyed", allow_abbrev=False, description=__doc__)
    found.add_argument("--workers", type=int, default=4, metavar="N", help="workers on one base model (4)")
    found.add_argument("--ctx-size", type=int, default=4096, metavar="N", help="tokens of context in 4 slots (4096)")
    found.add_argument("--model", type=Path, metavar="FILE", help="base model (GGUF); the demo's SmolLM2")
    found.add_argument("--out", type=Path, default=Path("build/bench"), metavar="DIR", help="for log and table")
    return found


async def _measure(options: argparse.Namespace, scratch: Path, log: Path) -> Footprint:
    """Start the workers, each with an adapter of its own, have each answer, and look while all are there."""
    model = options.model.absolute() if options.model else demo_model()
    base = BaseModel.from_gguf(model)
    registry = AdapterRegistry()
    for path in write_random_adapters(base, scratch, options.workers):
        registry.put(path.stem, path, survey_adapter(path.stem, path, base), source=Source.CONFIGURED)
    settings = WorkerSettings(
        model=model, socket=Path("worker.sock"), parallel=4, ctx_size=options.ctx_size, threads=usable_cpus()
    )
    buffers: list[dict[str, float]] = []
    workers: list[GraphWorker] = []
    async with AsyncExitStack() as stack:
        for adapter in registry:
            print(f"starting a worker for {adapter.name}", file=sys.stderr, flush=True)
            with _Log(log) as lines:
                worker = GraphWorker(settings)
                stack.push_async_callback(worker.stop, _STOP_SECONDS)
                await worker.start()
                bound = registry.bind(AdapterSet.of({adapter.id: 1.0}))
                await worker.change(bound)
                await _answer(worker, bound)
            workers.append(worker)
            buffers.append(lines.buffers)
        found = [
            WorkerMemory(
                pss=proportional_mib(worker.pid or 0),
                kv_cache=sizes.get("KV", 0.0) + sizes.get("RS", 0.0),
                buffers=sum(sizes.get(name, 0.0) for name in ("compute", "output", "LoRA")),
            )
            for worker, sizes in zip(workers, buffers, strict=True)
        ]
    return Footprint(model.stat().st_size / _MIB, tuple(found))


async def _answer(worker: GraphWorker, bound: Bound) -> None:
    """Two requests at once, so that everything that is allocated on demand is."""

    async def one(number: int) -> None:
        body = {"prompt": prompt(number), "n_predict": 32, "temperature": 0, "lora": bound.adapters.wire()}
        async with worker.session.post(f"{worker.base_url}/completion", json=body) as response:
            if response.status != 200:
                raise StartFailed(f"a worker refused a request: {await response.text()}")

    await asyncio.gather(one(0), one(1))


class _Log(logging.Handler):
    """What one worker says, while it is started: into a file, and the last size of each kind of buffer."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.DEBUG)
        self._path = path
        self._logger = logging.getLogger(_WORKER_LOG)
        self.buffers: dict[str, float] = {}

    def __enter__(self) -> _Log:
        self._before = self._logger.level
        self._logger.setLevel(logging.DEBUG)
        self._logger.addHandler(self)
        self._file = self._path.open("a")
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._before)
        self._file.close()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self._file.write(text + "\n")
        self.buffers |= {kind: float(size) for kind, size in _BUFFER.findall(text)}
