"""Setting one member of a JSON object in its text, so that the rest stays as it is, byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def with_member(data: bytes, name: str, value: object, present: bool) -> bytes:
    """``data``, a JSON object that was parsed before, with ``name`` set to ``value``.

    ``present``: it has the member already, which is replaced, as often as it is there; else it becomes the first.
    """
    member = f"{json.dumps(name)}:{json.dumps(value, separators=(',', ':'))}"
    if not present:
        opening = data.index(b"{") + 1
        empty = data[opening:].lstrip(b" \t\r\n").startswith(b"}")
        return b"".join((data[:opening], member.encode(), b"" if empty else b",", data[opening:]))
    text = data.decode("utf-8")
    pieces, done = [], 0
    for key, start, end in _members(text):
        if key == name:
            pieces += [text[done:start], member]
            done = end
    return "".join((*pieces, text[done:])).encode()


def _members(text: str) -> Iterator[tuple[str, int, int]]:
    """The members of the object that ``text`` holds: key, and where the member begins and ends."""
    at = _skip(text, text.index("{") + 1)
    while text[at] != "}":
        start = at
        key, at = _DECODER.raw_decode(text, at)
        at = _skip(text, _skip(text, at) + 1)  # past the colon
        _, at = _DECODER.raw_decode(text, at)
        yield key, start, at
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None  # it matches nothing, too
    return match.end()
