"""How PEFT's configuration picks modules: regular expressions of a stranger's, matched within bounds.

Rules: PEFT's get_pattern_key and check_target_module_exists. Python's expressions can take exponential time, so
those that could are refused, and so is an amount of matching that would take more than some seconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from loraproxy.adapters.checks import Refused
from loraproxy.adapters.names import shorten

_MAX_PATTERNS = 2048
_MAX_LENGTH = 256
_MAX_REPEATS = 2
_MAX_STEPS = 1 << 28
_REPEAT = re.compile(r"[*+?{]")
_ANY_LAYERS = re.compile(r".*\.[^.]*\.(\d{1,9})\.")


@dataclass(frozen=True)
class ModulePatterns:
    """alpha_pattern or rank_pattern: patterns over module names, in the file's order, each with its value."""

    where: str
    entries: tuple[tuple[re.Pattern[str], float], ...]
    repeats: tuple[int, ...]
    """How many repetitions each has."""

    @classmethod
    def parse(cls, value: Any, where: str, number: Callable[[Any, str], float]) -> ModulePatterns:
        """``number`` checks each value. Raises Refused with the reason."""
        entries = value or {}
        if not isinstance(entries, dict):
            raise Refused(f"adapter_config.json: {where} must be an object, not {shorten(value)}")
        if len(entries) > _MAX_PATTERNS:
            raise Refused(f"adapter_config.json: {where} has more than {_MAX_PATTERNS} entries")
        return cls(
            where,
            tuple(
                (_compiled(key, rf"(.*\.)?({key})$"), number(item, f"{where}[{shorten(key)}]"))
                for key, item in entries.items()
            ),
            tuple(len(_REPEAT.findall(key)) for key in entries),
        )

    def check_cost(self, modules: Collection[str]) -> None:
        """Raises Refused if matching all ``modules`` could take too long.

        A pattern with n repetitions takes at most some L^(n + 1) steps on a name of L characters.
        """
        lengths = [len(module) for module in modules]
        steps = sum(
            sum(length ** (n + 1) for length in lengths) * self.repeats.count(n) for n in range(_MAX_REPEATS + 1)
        )
        if steps > _MAX_STEPS:
            raise Refused(f"adapter_config.json: {self.where} has too many patterns for so many modules; write fewer")

    def value_for(self, module: str, default: float | None) -> Any:
        """The value of the first pattern that matches the end of ``module``, from a dot or its beginning on."""
        return next((value for pattern, value in self.entries if pattern.match(module)), default)


@dataclass(frozen=True)
class LayerChoice:
    """layers_to_transform and layers_pattern: PEFT loads no other layers. ``layers`` is None for all."""

    layers: frozenset[int] | None
    patterns: tuple[re.Pattern[str], ...] = ()

    @classmethod
    def parse(cls, layers: Any, patterns: Any) -> LayerChoice:
        """Raises Refused with the reason."""
        if layers is None or layers == []:
            return cls(None)
        chosen = layers if isinstance(layers, list) else [layers]
        if not all(type(layer) is int for layer in chosen):
            raise Refused(f"adapter_config.json: layers_to_transform must be numbers of layers, not {shorten(layers)}")
        names = [patterns] if isinstance(patterns, str) else patterns
        if not names or names == [""]:
            return cls(frozenset(chosen), (_ANY_LAYERS,))
        if not isinstance(names, list) or len(names) > 8 or not all(isinstance(name, str) for name in names):
            raise Refused(f"adapter_config.json: layers_pattern must be a name or a few, not {shorten(patterns)}")
        if any(_REPEAT.search(name) for name in names):
            raise Refused(
                f"adapter_config.json: layers_pattern {shorten(patterns)} has repetitions; write the name out"
            )
        return cls(frozenset(chosen), tuple(_compiled(name, rf".*\.{name}\.(\d{{1,9}})\.") for name in names))

    def has(self, module: str) -> bool:
        """True if PEFT loads ``module``."""
        if self.layers is None:
            return True
        for pattern in self.patterns:
            if match := pattern.match(module):
                return int(match[pattern.groups]) in self.layers
        return False


def _compiled(pattern: str, whole: str) -> re.Pattern[str]:
    """Compile ``whole``, which PEFT makes of ``pattern``. Refuses what is wrong or could take exponential time."""
    if len(pattern) > _MAX_LENGTH:
        raise Refused(f"adapter_config.json: the pattern {shorten(pattern)} is longer than {_MAX_LENGTH}")
    if len(_REPEAT.findall(pattern)) > _MAX_REPEATS or re.search(r"\)[*+{]", pattern):
        raise Refused(
            f"adapter_config.json: the pattern {shorten(pattern)} repeats groups or has more than {_MAX_REPEATS} "
            "repetitions; write the module names out"
        )
    try:
        return re.compile(whole)
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise Refused(f"adapter_config.json: the pattern {shorten(pattern)} is wrong: {error}") from None
