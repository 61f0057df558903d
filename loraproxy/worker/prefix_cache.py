"""The prompt cache: KV cells of prompts' beginnings, by adapter set, then by token prefix.

Cells computed under one adapter set are wrong under any other, so the set is the first part of the key. A
prefix is stored up to its last chunk cut and reused up to a chunk cut: the rest is then computed in the same
chunks as without the cache, which keeps the result bit-identical. Cells live in host memory, bounded in
bytes, the least recently used leaving first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loraproxy.adapters.sets import AdapterSet


@dataclass(eq=False)
class Entry:
    """The cells of ``tokens`` (int32, shape (n,)) under ``adapters``."""

    adapters: AdapterSet
    tokens: NDArray[np.int32]
    state: bytes

    @property
    def nbytes(self) -> int:
        """What the entry counts against the cache's limit."""
        return len(self.state) + self.tokens.nbytes


def _common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


class PrefixCache:
    """Least-recently-used prompt prefixes within ``capacity`` bytes. Lengths are in tokens."""

    def __init__(self, capacity: int, chunk: int) -> None:
        self.capacity = capacity
        self.chunk = chunk
        self.nbytes = 0
        self._sets: dict[AdapterSet, list[Entry]] = {}
        self._order: OrderedDict[int, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def cut(self, n_prompt: int) -> int:
        """How much of a prompt may be cached: whole chunks, and at least one token is left to give logits."""
        return (n_prompt - 1) // self.chunk * self.chunk

    def find(self, adapters: AdapterSet, prompt: tuple[int, ...]) -> tuple[Entry, int] | None:
        """The entry to restore and how many of its first cells to keep; None: nothing reusable."""
        limit = self.cut(len(prompt))
        if limit == 0 or adapters not in self._sets:
            return None
        wanted = np.asarray(prompt[:limit], dtype=np.int32)
        best, length = None, 0
        for entry in self._sets[adapters]:
            common = _common(entry.tokens, wanted) // self.chunk * self.chunk
            if common > length:
                best, length = entry, common
        if best is None:
            return None
        self._order.move_to_end(id(best))
        return best, length

    def wants(self, adapters: AdapterSet, prompt: tuple[int, ...]) -> bool:
        """Whether the prompt's cells up to its cut are worth storing: some, and not there yet."""
        limit = self.cut(len(prompt))
        if limit == 0 or self.capacity == 0:
            return False
        wanted = np.asarray(prompt[:limit], dtype=np.int32)
        return all(_common(entry.tokens, wanted) < limit for entry in self._sets.get(adapters, ()))

    def store(self, adapters: AdapterSet, prompt: tuple[int, ...], state: bytes) -> None:
        """Keep the cells of ``prompt`` up to its cut. Entries that it extends are dropped."""
        entry = Entry(adapters, np.asarray(prompt[: self.cut(len(prompt))], dtype=np.int32), state)
        if entry.nbytes > self.capacity:
            return
        entries = self._sets.setdefault(adapters, [])
        for old in [e for e in entries if _common(e.tokens, entry.tokens) == len(e.tokens)]:
            self._drop(old)
        self._sets.setdefault(adapters, entries).append(entry)
        self._order[id(entry)] = entry
        self.nbytes += entry.nbytes
        while self.nbytes > self.capacity:
            self._drop(next(iter(self._order.values())))

    def forget_adapter(self, adapter_id: int) -> None:
        """Drop every entry under a set with this adapter."""
        for adapters in [s for s in self._sets if any(i == adapter_id for i, _ in s.entries)]:
            for entry in list(self._sets[adapters]):
                self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        del self._order[id(entry)]
        self.nbytes -= entry.nbytes
        entries = self._sets[entry.adapters]
        entries.remove(entry)
        if not entries:
            del self._sets[entry.adapters]
