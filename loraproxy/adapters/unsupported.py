"""What to do with the parts of an adapter that cannot be applied."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from loraproxy.adapters.checks import Refused, listed

WAY_OUT = "train a plain LoRA, or merge the adapter into the base model"
_LEFT_OUT = "left out"


class Unsupported(Enum):
    """Refuse an adapter with unsupported parts, or apply the rest of it and say what was left out.

    What is dangerous or damaged (truncated files, NaN weights, another model's shapes) is refused either way.
    """

    REFUSE = "refuse"
    LEAVE_OUT = "leave_out"


class LeftOut:
    """The unsupported parts met while reading one adapter."""

    def __init__(self, unsupported: Unsupported) -> None:
        self._unsupported = unsupported
        self._sentences: list[str] = []

    @property
    def sentences(self) -> tuple[str, ...]:
        """For :attr:`Adapter.left_out`: one for each part."""
        return tuple(self._sentences)

    def add(self, what: str, tensors: Iterable[str] = (), *, way_out: str = WAY_OUT, instead: str = _LEFT_OUT) -> None:
        """Note ``what`` cannot be applied, of which tensors. Raises Refused unless it may be left out.

        ``instead`` says what becomes of it then.
        """
        names = listed(tensors)
        shown = f"{what} ({names})" if names else what
        if self._unsupported is Unsupported.REFUSE:
            rest = "loads the rest" if instead == _LEFT_OUT else "loads it nevertheless"
            raise Refused(f"{shown}: {way_out}; --ignore-unsupported {rest}")
        self._sentences.append(f"{shown}: {instead}")
