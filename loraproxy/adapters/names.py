"""What an adapter may be called, and what to say when a name is not known."""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Collection

from loraproxy.errors import InvalidRequest
from loraproxy.spelling import nearest

BASE_WORD = "none"
"""Selects the base model wherever an adapter's name may stand."""

RESERVED = frozenset({BASE_WORD, "base"})
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_SHOWN = 24
_COMPARED = 48


def check_name(name: str) -> str:
    """Return ``name`` if an adapter may bear it.

    1 to 128 of ``A-Z a-z 0-9 . _ -``, not starting with a dot, and none of the reserved words ``none`` and
    ``base`` in any case. Raises InvalidRequest otherwise. Names go into URLs, headers and ``base:adapter``.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{shorten(name)} cannot name an adapter: use 1 to 128 of A-Z a-z 0-9 . _ - and no dot at the start"
        )
    if name.lower() in RESERVED:
        raise InvalidRequest(f"{name!r} cannot name an adapter: the word is reserved for the base model")
    return name


def shorten(value: object, limit: int = 80) -> str:
    """``repr(value)``, cut after ``limit`` characters, for use in messages."""
    text = repr(value if not isinstance(value, (str, bytes)) else value[:limit])
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _likely(name: str, known: Collection[str]) -> Collection[str]:
    """Those worth comparing letter by letter, which takes too long for a thousand: with the most of both ends alike."""
    if len(known) <= _COMPARED:
        return known
    return heapq.nlargest(_COMPARED, known, key=lambda other: _alike(name, other) + _alike(name[::-1], other[::-1]))


def _alike(one: str, other: str) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def known_names(name: str, known: Collection[str]) -> str:
    """The end of an "unknown name" message: the nearest known name, if one is near, and the known names."""
    if not known:
        return "no adapters are loaded"
    near = nearest(name[:128], _likely(name[:128], known))
    hint = f"did you mean {near!r}? " if near else ""
    shown = ", ".join(sorted(known)[:_SHOWN])
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return f"{hint}known adapters: {shown}{more}"
