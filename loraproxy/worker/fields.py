"""Reading typed fields of a request's JSON object, with errors that name the field, the value and what would be right.

As in llama-server (``field::eval`` in tools/server/server-schema.cpp) a null counts as absent, a field may
have aliases of which the first present one wins, soft limits clamp and hard limits refuse. What is stricter
here: a number given as a string, a fraction where an integer is asked for, and anything not finite are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from loraproxy.errors import InvalidRequest

INT32_MAX = 2**31 - 1
FLOAT32_MAX = 3.4028234663852886e38


def shown(value: Any) -> str:
    """``value`` as JSON, cut to what fits an error message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def wrong(name: str, expected: str, value: Any) -> InvalidRequest:
    """The error for a field of the wrong type or range, in llama-server's style."""
    return InvalidRequest(f"Field '{name}': expected {expected}, but got {shown(value)}")


def as_integer(name: str, value: Any) -> int:
    """``value`` as an int; 32.0 counts as 32. Raises InvalidRequest for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise wrong(name, "an integer", value)


def as_number(name: str, value: Any) -> float:
    """``value`` as a float that float32 can hold. Raises InvalidRequest for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if abs(number) <= FLOAT32_MAX:
            return number
        raise wrong(name, "a finite number", value)
    raise wrong(name, "a number", value)


def as_strings(name: str, value: Any) -> tuple[str, ...]:
    """``value`` as a tuple of strings. Raises InvalidRequest for anything else."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise wrong(name, "an array of strings", value)
    return tuple(value)


class Fields:
    """One JSON object of a request."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data

    def find(self, *names: str) -> tuple[str, Any] | None:
        """The first of ``names`` that is present and not null, with its value."""
        for name in names:
            value = self.data.get(name)
            if value is not None:
                return name, value
        return None

    def flag(self, name: str, default: bool) -> bool:
        """A JSON boolean."""
        value = self.data.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise wrong(name, "true or false", value)

    def integer(self, *names: str, default: int, low: int = -INT32_MAX, high: int = INT32_MAX) -> int:
        """An integer; one outside ``low``..``high`` is refused."""
        found = self.find(*names)
        if found is None:
            return default
        value = as_integer(*found)
        if not low <= value <= high:
            raise wrong(found[0], f"an integer between {low} and {high}", found[1])
        return value

    def number(self, name: str, default: float) -> float:
        """Any finite number."""
        found = self.find(name)
        return default if found is None else as_number(*found)

    def clamped_integer(self, name: str, default: int, low: int, high: int) -> int:
        """An integer, brought into ``low``..``high``."""
        found = self.find(name)
        return default if found is None else max(low, min(high, as_integer(*found)))

    def clamped_number(self, name: str, default: float, low: float, high: float) -> float:
        """A finite number, brought into ``low``..``high``."""
        found = self.find(name)
        return default if found is None else max(low, min(high, as_number(*found)))

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self.data.get(name)
        if value is None:
            return default
        if isinstance(value, str):
            return value
        raise wrong(name, "a string", value)

    def strings(self, name: str) -> tuple[str, ...]:
        """An array of strings; absent: empty."""
        value = self.data.get(name)
        return () if value is None else as_strings(name, value)

    def object(self, name: str) -> dict[str, Any]:
        """A JSON object; absent: empty."""
        value = self.data.get(name)
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        raise wrong(name, "an object", value)
