"""Long lists in few words: targets by layers, numbers by how often they occur, messages that are alike."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from loraproxy.tools.survey import Survey

_LAYER = re.compile(r"(?:.*\.)?(?:blk|layers|h|blocks|block|layer)\.(\d{1,6})\.(.+)")
_NUMBER = re.compile(r"\.\d+\.")
_SHOWN = 12


def grouped_targets(names: Iterable[str]) -> str:
    """``q_proj, v_proj in layers 0-29; lm_head``, from modules' or GGUF tensors' names."""
    layers: dict[str, set[int]] = {}
    for name in names:
        match = _LAYER.fullmatch(name)
        leaf = (match[2] if match else name).removesuffix(".weight").rpartition(".")[2]
        layers.setdefault(leaf, set()).update({int(match[1])} if match else set())
    groups: dict[tuple[int, ...], list[str]] = {}
    for leaf, found in layers.items():
        groups.setdefault(tuple(sorted(found)), []).append(leaf)
    parts = []
    for where, leaves in list(groups.items())[:_SHOWN]:
        joined = ", ".join(leaf[:80] for leaf in leaves[:_SHOWN])
        joined += f" and {len(leaves) - _SHOWN} more" if len(leaves) > _SHOWN else ""
        parts.append(f"{joined} in layer{'s' * (len(where) > 1)} {_ranges(where)}" if where else joined)
    more = [f"and {len(groups) - _SHOWN} more groups"] if len(groups) > _SHOWN else []
    return "; ".join(parts + more)


def _ranges(numbers: Sequence[int]) -> str:
    """``0-5, 7, 9-11`` from sorted numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:_SHOWN]]
    return ", ".join(shown) + (" and more" if len(runs) > _SHOWN else "")


def spread(values: Iterable[float]) -> str:
    """``8``, or ``4 (30 times), 16 (60 times)``."""
    counts = Counter(f"{value:.3g}" for value in values)
    if len(counts) == 1:
        return next(iter(counts))
    shown = [f"{value} ({n} times)" for value, n in sorted(counts.items(), key=lambda item: float(item[0]))]
    return ", ".join(shown[:_SHOWN]) + (" and more" if len(shown) > _SHOWN else "")


def scale_line(survey: Survey) -> str:
    """``2.83 = 8 / sqrt(8) (rsLoRA)``: the scale that the file gives its pairs, and where it comes from."""
    found = {
        (module.scale, module.alpha, module.b.shape[-1])
        for module in survey.modules
        if module.b.shape and math.isfinite(module.scale)
    }
    if not found:
        return "unknown"
    kind = " (rsLoRA)" if survey.rslora else ""
    parts = []
    for scale, alpha, rank in sorted(found)[:_SHOWN]:
        divisor = f"sqrt({rank})" if survey.rslora else f"{rank}"
        parts.append(f"{scale:.3g} = {alpha:g} / {divisor}" if alpha else f"{scale:.3g} (alpha 0: as it is)")
    return ", ".join(parts) + (" and more" if len(found) > _SHOWN else "") + kind


def alike(messages: Iterable[str]) -> list[str]:
    """One message of each group that differs in layers and other numbers within names, and how many are like it."""
    groups: dict[str, list[str]] = {}
    for message in messages:
        groups.setdefault(_NUMBER.sub(".N.", message), []).append(message)
    return [
        first if not rest else f"{first} (and {len(rest)} more like it, of other layers)"
        for first, *rest in groups.values()
    ]
