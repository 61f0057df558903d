"""``loraproxy bench adapters``: many more adapters than memory, and an adapter's load beside running streams."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.gguf_write import write_gguf_adapter
from loraproxy.adapters.read import read_adapter
from loraproxy.adapters.tensors import Adapter
from loraproxy.bench import processes
from loraproxy.bench.client_process import run_stream
from loraproxy.bench.machine import describe_machine, usable_cpus
from loraproxy.bench.memory import worker_of
from loraproxy.bench.processes import ServerProcess, Setup
from loraproxy.bench.random_adapters import random_adapter
from loraproxy.bench.report import as_markdown, as_text
from loraproxy.bench.scenarios import prompt
from loraproxy.bench.wire import StreamTimes
from loraproxy.demonstration import demo_config, demo_model

_MIB = 1024**2
_STREAMS = 32
_RESIDENT = 8
_BUDGET = 64
_TOKENS = 64
_ZIPF = 1.0
"""The k-th most popular adapter is asked for 1/k as often as the first."""
_LOADS = 10
_RUNNING = 8
_SETTLE_SECONDS = 0.6
_NEW_RANK = 8
"""Rank 8 on all projections: 4.9 MB in f16."""


@dataclass(frozen=True)
class Spread:
    """Tokens per second under requests that are spread over some adapters, and what the worker held."""

    tokens_per_second: float
    ttft_p50: float
    ttft_p99: float
    peak_mib: float
    """The worker's resident memory at its highest, less what it was without adapters."""


@dataclass(frozen=True)
class LoadGaps:
    """What the streams that ran noticed of loads, in milliseconds."""

    usual_p99: float
    worst: float
    """The longest gap of any stream while a request under a new adapter came in and began."""
    ttft_resident: float
    ttft_new: float


def main(arguments: Sequence[str]) -> int:
    """Measure and print two tables; the exit code is 0. Raises StartFailed."""
    options = _parser().parse_args(arguments)
    base = BaseModel.from_gguf(demo_model())
    folder: Path = options.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"- {line}" for line in describe_machine()]
    with TemporaryDirectory(prefix="loraproxy-bench-") as scratch:
        rows = asyncio.run(_spread_rows(options, base, Path(scratch), folder))
        _publish(rows, lines)
        gaps = asyncio.run(_gap_rows(base, Path(scratch), folder))
        _publish(gaps, lines)
    (folder / "adapters.md").write_text("\n".join(lines) + "\n")
    print(f"\nWritten: {folder / 'adapters.md'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="loraproxy bench adapters", allow_abbrev=False, description=__doc__)
    found.add_argument("--registered", type=int, default=1000, metavar="N", help="adapters that are registered (1000)")
    found.add_argument("--requests", type=int, default=192, metavar="N", help="requests of each measurement (192)")
    found.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of which the median counts (3)")
    found.add_argument("--out", type=Path, default=Path("build/bench"), metavar="DIR", help="for logs and the tables")
    return found


def _publish(rows: list[list[str]], lines: list[str]) -> None:
    print("\n" + as_text(rows))
    lines += ["", as_markdown(rows)]


# -- many adapters -------------------------------------------------------------------------------------------


async def _spread_rows(options: argparse.Namespace, base: BaseModel, scratch: Path, folder: Path) -> list[list[str]]:
    library = scratch / "library"
    library.mkdir()
    _say(f"writing {options.registered} adapters")
    names = _write_library(base, library, options.registered)
    sizes = [adapter.summary.resident_bytes for adapter in _characters(base)]
    budget = _BUDGET * sum(sizes) // len(sizes)
    few = names[:_RESIDENT]
    setup = Setup(demo_model(), (), _STREAMS, _STREAMS * 256, usable_cpus(), folder)
    runs: dict[str, list[Spread]] = {"few": [], "many": []}
    _say("starting the server")
    with processes.product(setup, ["--adapters-dir", str(library), "--adapter-memory", str(budget)]) as server:
        bare = await _bare_memory(server)
        popular = _zipf(names, options.requests * options.repeats)
        await _drive(server, few, 2, bare)
        for repeat in range(options.repeats):
            chosen = popular[repeat * options.requests : (repeat + 1) * options.requests]
            even = [few[i % len(few)] for i in range(options.requests)]
            for key, sequence in (("few", even), ("many", chosen))[:: 1 if repeat % 2 else -1]:
                run = await _drive(server, sequence, _TOKENS, bare)
                runs[key].append(run)
                _say(f"{repeat + 1}/{options.repeats} {key}: {run.tokens_per_second:.1f} tokens/s")
        metrics = _metrics(server)
    return _spread_table(runs, budget, options.registered, metrics)


def _spread_table(
    runs: dict[str, list[Spread]], budget: int, registered: int, metrics: dict[str, float]
) -> list[list[str]]:
    few, many = (median(run.tokens_per_second for run in runs[key]) for key in ("few", "many"))
    titles = {
        "few": f"{_STREAMS} streams over {_RESIDENT} adapters, all loaded",
        "many": f"{_STREAMS} streams over {registered} adapters (Zipf), memory for {_BUDGET}",
    }
    rows = [["load", "tokens/s", "TTFT p50", "p99", "memory of adapters", "of 8 adapters"]]
    for key, title in titles.items():
        ttft50, ttft99 = (median(getattr(run, f) for run in runs[key]) for f in ("ttft_p50", "ttft_p99"))
        peak = max(run.peak_mib for run in runs[key])
        speed = few if key == "few" else many
        rows.append(
            [title, f"{speed:.1f}", f"{ttft50:.0f}", f"{ttft99:.0f}", f"{peak:.0f} MiB", f"{speed / few:.2f} x"]
        )
    loads, evictions = (int(metrics[name]) for name in (_LOADS_METRIC, _EVICTIONS_METRIC))
    rows.append([f"budget {budget / _MIB:.0f} MiB; {loads} loads, {evictions} evictions", "", "", "", "", ""])
    return rows


_LOADS_METRIC = "loraproxy_adapter_load_seconds_count"
_EVICTIONS_METRIC = "loraproxy_adapter_evictions_total"


def _characters(base: BaseModel) -> list[Adapter]:
    return [read_adapter(name, adapter.path, base) for name, adapter in demo_config().adapters.items()]


def _write_library(base: BaseModel, folder: Path, count: int) -> list[str]:
    """``count`` files in f16: the demo's characters in turn, every weight perturbed by some per cent."""
    characters = _characters(base)
    noise = np.random.default_rng(0)
    names = []
    for number in range(count):
        original = characters[number % len(characters)]
        factor = np.float32(1 + 0.02 * noise.standard_normal())
        tensors = tuple(replace(t, b=t.b * factor) for t in original.tensors)
        name = f"{original.name}-{number:04}"
        write_gguf_adapter(replace(original, name=name, tensors=tensors), base, folder / f"{name}.gguf", "f16")
        names.append(name)
    random.Random(1).shuffle(names)
    return names


def _zipf(names: Sequence[str], count: int) -> list[str]:
    weights = [1 / rank**_ZIPF for rank in range(1, len(names) + 1)]
    return random.Random(2).choices(list(names), weights, k=count)


async def _drive(server: ServerProcess, names: Sequence[str], n_predict: int, bare: int) -> Spread:
    """Requests under ``names`` in turn, always as many at once as there are slots."""
    queue = list(enumerate(names))[::-1]
    times: list[StreamTimes] = []
    peak = 0

    async def client() -> None:
        nonlocal peak
        while queue:
            number, name = queue.pop()
            body = _body(prompt(number), name, n_predict)
            times.append(await run_stream("127.0.0.1", server.port, body))
            peak = max(peak, _worker_bytes(server))

    await asyncio.gather(*(client() for _ in range(min(_STREAMS, len(queue)))))
    began = min(stream.sent for stream in times)
    ended = max(stream.arrivals[-1] for stream in times)
    first = [1e3 * (stream.arrivals[0] - stream.sent) for stream in times]
    return Spread(
        tokens_per_second=sum(stream.n_tokens for stream in times) / (ended - began),
        ttft_p50=float(np.percentile(first, 50)),
        ttft_p99=float(np.percentile(first, 99)),
        peak_mib=(peak - bare) / _MIB,
    )


async def _bare_memory(server: ServerProcess) -> int:
    """The worker's memory once all slots have worked, without any adapter."""
    bodies = [_body(prompt(i), None, _TOKENS) for i in range(_STREAMS)]
    await asyncio.gather(*(run_stream("127.0.0.1", server.port, body) for body in bodies))
    return _worker_bytes(server)


# -- a load beside running streams -----------------------------------------------------------------------------


async def _gap_rows(base: BaseModel, scratch: Path, folder: Path) -> list[list[str]]:
    library = scratch / "new"
    library.mkdir()
    _say("loading adapters beside running streams")
    running = [f"running-{i}" for i in range(_RUNNING)]
    new = [f"new-{i}" for i in range(_LOADS)]
    for seed, name in enumerate([*running, *new]):
        adapter = random_adapter(base, name, seed)
        tensors = tuple(
            replace(t, a=t.a[:_NEW_RANK], b=np.ascontiguousarray(t.b[:, :_NEW_RANK])) for t in adapter.tensors
        )
        write_gguf_adapter(replace(adapter, tensors=tensors), base, library / f"{name}.gguf", "f16")
    size = (library / f"{new[0]}.gguf").stat().st_size
    setup = Setup(demo_model(), (), _RUNNING + 1, (_RUNNING + 1) * 1280, usable_cpus(), folder)
    with processes.product(setup, ["--adapters-dir", str(library), "--adapter-memory", "0"]) as server:
        found = await _measure_gaps(server, running, new)
    return [
        [f"an adapter of {size / 1e6:.1f} MB is loaded while {_RUNNING} streams run", "ms", ""],
        ["gap between two tokens of a stream, p99, nothing being loaded", f"{found.usual_p99:.0f}", ""],
        [
            "longest gap of any stream while an adapter is loaded",
            f"{found.worst:.0f}",
            f"{found.worst / found.usual_p99:.2f} x",
        ],
        ["first token under a resident adapter, median", f"{found.ttft_resident:.0f}", ""],
        [
            "first token under a new adapter, median",
            f"{found.ttft_new:.0f}",
            f"+ {found.ttft_new - found.ttft_resident:.0f}",
        ],
    ]


async def _measure_gaps(server: ServerProcess, running: Sequence[str], new: Sequence[str]) -> LoadGaps:
    """Requests under new and under resident adapters come in turn while the streams run."""

    async def ask(name: str) -> StreamTimes:
        return await run_stream("127.0.0.1", server.port, _body(prompt(40), name, 4))

    await asyncio.gather(*(ask(name) for name in running))
    streams = [
        asyncio.create_task(run_stream("127.0.0.1", server.port, _body(prompt(i), name, 1000)))
        for i, name in enumerate(running)
    ]
    await asyncio.sleep(3 * _SETTLE_SECONDS)
    fresh, known = [], []
    for name in new:
        known.append(await ask(running[0]))
        await asyncio.sleep(_SETTLE_SECONDS)
        fresh.append(await ask(name))
        await asyncio.sleep(_SETTLE_SECONDS)
    ended_early = [stream for stream in streams if stream.done()]
    times = [await stream for stream in streams]
    if ended_early:
        _say("warning: some streams ended before the last load; the figures will be too good")
    windows = [(times.sent, times.arrivals[0]) for times in fresh]
    first = min(times.sent for times in known)
    usual, loading = [], []
    for stream in times:
        for before, after in zip(stream.arrivals, stream.arrivals[1:], strict=False):
            if any(before < end and after > begin for begin, end in windows):
                loading.append(after - before)
            elif before > first:
                usual.append(after - before)
    return LoadGaps(
        usual_p99=1e3 * float(np.percentile(usual, 99)),
        worst=1e3 * max(loading),
        ttft_resident=1e3 * median(t.arrivals[0] - t.sent for t in known),
        ttft_new=1e3 * median(t.arrivals[0] - t.sent for t in fresh),
    )


# -- the server ------------------------------------------------------------------------------------------------


def _body(text: str, lora: str | None, n_predict: int) -> bytes:
    body = {
        "prompt": text,
        "n_predict": n_predict,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
        "lora": lora or "none",
    }
    return json.dumps(body).encode()


def _worker_bytes(server: ServerProcess) -> int:
    """The worker's resident memory; 0 where there is no /proc."""
    worker = worker_of(server.process.pid)
    if worker is None:
        return 0
    pages = int(Path(f"/proc/{worker}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _metrics(server: ServerProcess) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs if name}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
