"""The plot: throughput and latencies of each load, the servers side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from loraproxy.bench.figures import Figures
from loraproxy.bench.report import PEER, PRODUCT, Results

_COLOURS = {PRODUCT: "#0b6e99", PEER: "#c98a2b"}
_BAR = 0.38


def write_plot(results: Results, path: Path) -> None:
    """Write a PNG to ``path``. Raises ImportError when matplotlib is not installed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 0.62 * len(results.scenarios) + 1.6), sharey=True)
    _panel(axes[0], results, "tokens/s (more is better)", lambda f: (f.tokens_per_second, None))
    _panel(axes[1], results, "time to first token, ms: p50, line to p99", lambda f: (f.ttft_p50, f.ttft_p99))
    _panel(axes[2], results, "inter-token latency, ms: p50, line to p99", lambda f: (f.itl_p50, f.itl_p99))
    axes[0].set_yticks(range(len(results.scenarios)), [scenario.title for scenario in results.scenarios])
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower right", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _panel(axis: Any, results: Results, title: str, of: Callable[[Figures], tuple[float, float | None]]) -> None:
    for offset, server in ((-_BAR / 2, PRODUCT), (_BAR / 2, PEER)):
        found = [(row, results.figures.get((s.key, server))) for row, s in enumerate(results.scenarios)]
        bars = [(row + offset, of(figures)) for row, figures in found if figures is not None]
        if not bars:
            continue
        places, values = [place for place, _ in bars], [value for _, (value, _) in bars]
        axis.barh(places, values, height=_BAR, color=_COLOURS[server], label=server)
        for place, (value, high) in bars:
            if high is not None:
                axis.plot([value, high], [place, place], color="black", linewidth=1)
            else:
                axis.text(value, place, f" {value:.0f}", va="center", fontsize=8)
    axis.set_title(title, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.12)
