"""From tokens to text that may be shown: whole UTF-8 characters, and nothing that could be a stop string."""

from __future__ import annotations

import codecs


class TextStream:
    """Collects a generation's bytes and releases text.

    Text is held back while it ends in an incomplete UTF-8 character or in what could become a stop string.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = tuple(s for s in stop if s)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopping_word = ""
        """The stop string that was found; "" so far."""
        self.has_new_line = False

    def push(self, piece: bytes) -> str:
        """Add one token's bytes; returns the text that may be shown now. Sets ``stopping_word`` when one appears."""
        text = self._decoder.decode(piece)
        self.has_new_line = self.has_new_line or "\n" in text
        return self._release(text) if text else ""

    def finish(self) -> str:
        """The generation ended by itself: what was held back is text after all."""
        if self.stopping_word:
            return ""
        text = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        held = self._held + text
        if not self._stop:
            return held
        found = [(held.index(s), s) for s in self._stop if s in held]
        if found:
            at, self.stopping_word = min(found)
            self._held = ""
            return held[:at]
        keep = max((_overlap(held, s) for s in self._stop), default=0)
        self._held = held[len(held) - keep :] if keep else ""
        return held[: len(held) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` that ``stop`` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
