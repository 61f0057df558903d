"""The table, the figures to reach and the report file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from loraproxy.bench.figures import Figures
from loraproxy.bench.memory import ALLOWANCE_MIB, Memory
from loraproxy.bench.scenarios import Scenario

PRODUCT = "loraproxy"
PEER = "llama-server"
ENGINE = "engine alone"
"""The product's engine in its own process, without HTTP."""


@dataclass
class Results:
    """All that was measured: for each scenario and server the medians over the repeats."""

    machine: list[str]
    scenarios: list[Scenario]
    repeats: int
    n_predict: int
    figures: dict[tuple[str, str], Figures] = field(default_factory=dict)
    """By the scenario's key and the server's name."""
    runs: dict[tuple[str, str], list[Figures]] = field(default_factory=dict)
    foreign: list[float] = field(default_factory=list)
    """The share of the CPUs that other programs took during each run."""
    memory: Memory | None = None

    def speed(self, scenario: str, server: str) -> float | None:
        """Tokens per second, if it was measured."""
        found = self.figures.get((scenario, server))
        return found.tokens_per_second if found else None

    def ratio(self, scenario: str, server: str, over: tuple[str, str]) -> float | None:
        """Tokens per second of one measurement over another's."""
        upper, lower = self.speed(scenario, server), self.speed(*over)
        return upper / lower if upper and lower else None


@dataclass(frozen=True)
class Goal:
    """A figure to reach, and what was reached (None: not measured)."""

    title: str
    wanted: str
    reached: float | None
    unit: str
    met: Callable[[float], bool]

    def row(self) -> list[str]:
        """A row of the table of goals."""
        if self.reached is None:
            return [self.title, self.wanted, "not measured", ""]
        return [self.title, self.wanted, f"{self.reached:.2f} {self.unit}", "yes" if self.met(self.reached) else "no"]


def goals(results: Results) -> list[Goal]:
    """The figures that the product promises."""
    http = results.ratio("different", PRODUCT, ("different", ENGINE))
    title = {scenario.key: scenario.title for scenario in results.scenarios}
    different, wide = title.get("different", "different adapters"), title.get("wide", "many streams")
    own = results.ratio("different", PRODUCT, ("base", PRODUCT))
    peer = results.ratio("different", PRODUCT, ("different", PEER))
    wide_peer = results.ratio("wide", PRODUCT, ("wide", PEER))
    overhead = results.memory.overhead if results.memory else None
    return [
        Goal(f"{different}, over the same without adapters", "at least 0.85", own, "x", lambda x: x >= 0.85),
        Goal(f"{different}, over {PEER}", "at least 2", peer, "x", lambda x: x >= 2),
        Goal(f"{wide}, over {PEER}", "at least 2.5", wide_peer, "x", lambda x: x >= 2.5),
        Goal(
            "cost of the HTTP layers in throughput",
            "at most 10",
            None if http is None else 100 * (1 - http),
            "%",
            lambda x: x <= 10,
        ),
        Goal(
            "worker's memory beyond base file, KV cache, compute buffers and adapters",
            f"at most {ALLOWANCE_MIB}",
            overhead,
            "MiB",
            lambda x: x <= ALLOWANCE_MIB,
        ),
    ]


_HEADINGS = ["load", "server", "tokens/s", "TTFT p50", "p99", "ITL p50", "p99", f"of {PEER}", "of no adapter"]


def table(results: Results) -> list[list[str]]:
    """The rows of the table of speeds, its headings first; latencies in milliseconds."""
    return [_HEADINGS, *_speed_rows(results)]


def _speed_rows(results: Results) -> Iterator[list[str]]:
    base_of = {"different": "base", "same": "base", "one": "one-base", "wide": "wide-base"}
    for scenario in results.scenarios:
        for server in (PRODUCT, PEER, ENGINE):
            figures = results.figures.get((scenario.key, server))
            if figures is None:
                continue
            of_peer = results.ratio(scenario.key, server, (scenario.key, PEER)) if server != PEER else None
            base = base_of.get(scenario.key)
            of_base = results.ratio(scenario.key, server, (base, server)) if base else None
            latencies = (figures.ttft_p50, figures.ttft_p99, figures.itl_p50, figures.itl_p99)
            yield [
                scenario.title,
                server,
                f"{figures.tokens_per_second:.1f}",
                *(f"{value:.0f}" for value in latencies),
                _times(of_peer),
                _times(of_base),
            ]


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f} x"


def goal_table(results: Results) -> list[list[str]]:
    """The rows of the table of goals, its headings first."""
    return [["figure", "wanted", "reached", "met"], *(goal.row() for goal in goals(results))]


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table for a Markdown file."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def memory_lines(memory: Memory) -> list[str]:
    """What the worker's memory is made of."""
    parts = (
        f"base file {memory.base_file:.0f} + KV cache {memory.kv_cache:.0f} + compute and output buffers"
        f" {memory.compute:.0f} + adapters {memory.adapters:.0f}"
    )
    return [
        f"Worker: {memory.rss:.0f} MiB resident ({memory.pss:.0f} MiB with shared pages counted in proportion);"
        f" {parts} = {memory.needed:.0f} MiB."
    ]


def write_report(results: Results, folder: Path) -> None:
    """``report.md`` for people and ``results.json`` for programs."""
    lines = [
        *(f"- {line}" for line in results.machine),
        f"- {results.n_predict} tokens generated a stream, greedy; prompts of {_prompt_tokens(results):.0f} tokens;"
        f" medians of {results.repeats} runs, the servers taking turns",
        f"- other programs took {_percent(results.foreign)} of the CPUs during the runs",
        "",
        as_markdown(table(results)),
        "",
        "TTFT: time to first token; ITL: inter-token latency; both in milliseconds.",
        "",
        as_markdown(goal_table(results)),
        "",
        *(memory_lines(results.memory) if results.memory else []),
    ]
    (folder / "report.md").write_text("\n".join(lines) + "\n")
    data = {
        "machine": results.machine,
        "n_predict": results.n_predict,
        "runs": [
            {"scenario": scenario, "server": server, "runs": [asdict(run) for run in runs]}
            for (scenario, server), runs in results.runs.items()
        ],
        "foreign_share": results.foreign,
        "memory_mib": asdict(results.memory) if results.memory else None,
    }
    (folder / "results.json").write_text(json.dumps(data, indent=1) + "\n")


def _percent(shares: Sequence[float]) -> str:
    if not shares:
        return "an unknown share"
    return f"{median(shares):.1%} (at most {max(shares):.1%})"


def _prompt_tokens(results: Results) -> float:
    return next(iter(results.figures.values())).n_prompt if results.figures else 0.0
