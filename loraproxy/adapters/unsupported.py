"""What to do with the parts of an adapter that cannot be applied."""

from __future__ import annotations

from enum import Enum


class Unsupported(Enum):
    """Refuse an adapter with unsupported parts, or apply the rest of it and say what was left out.

    What is dangerous or damaged (truncated files, NaN weights, another model's shapes) is refused either way.
    """

    REFUSE = "refuse"
    LEAVE_OUT = "leave_out"
