"""Which sequences run, in which slots, and whose turn it is.

``waiting`` holds sequences by adapter set; ``slots`` those that run. Sets share the engine by virtual token
counters (VTC, "Fairness in Serving Large Language Models", arXiv:2401.00588): the set that was served least
goes first, for slots and for prompt chunks. A set that comes back after a pause starts at the least counter
of those present, so that it cannot save up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from loraproxy.adapters.sets import AdapterSet
from loraproxy.worker.sequence import Sequence

PROMPT_WEIGHT = 1.0
DECODE_WEIGHT = 2.0
"""VTC's cost of a prompt token and of a generated one."""


@dataclass(frozen=True)
class Rows:
    """The consecutive slots of one decode; ``first`` is the id of the first. None: a slot that only fills a gap."""

    first: int
    sequences: tuple[Sequence | None, ...]


class Scheduler:
    """Two places a sequence can be, one method that admits, two that pick, one that charges."""

    def __init__(self, n_slots: int) -> None:
        self.slots: list[Sequence | None] = [None] * n_slots
        self.waiting: dict[AdapterSet, deque[Sequence]] = {}
        self._served: dict[AdapterSet, float] = {}

    @property
    def n_waiting(self) -> int:
        """Sequences without a slot."""
        return sum(len(queue) for queue in self.waiting.values())

    def running(self) -> list[Sequence]:
        """Sequences with a slot."""
        return [s for s in self.slots if s is not None]

    def decoding(self) -> list[Sequence]:
        """Sequences whose prompt is done."""
        return [s for s in self.slots if s is not None and not s.prefilling]

    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting and not self.running()

    # -- coming and going ----------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        adapters = sequence.generation.adapters
        present = {s.generation.adapters for s in self.running()} | set(self.waiting)
        if adapters not in present:
            floor = min((self._served.get(a, 0.0) for a in present), default=0.0)
            self._served[adapters] = max(self._served.get(adapters, 0.0), floor) if present else 0.0
            self._forget(present | {adapters})
        self.waiting.setdefault(adapters, deque()).append(sequence)

    def _forget(self, present: set[AdapterSet]) -> None:
        self._served = {a: n for a, n in self._served.items() if a in present}

    def admit(self) -> Sequence | None:
        """Give the next waiting sequence the lowest free slot; None if there is no slot or nobody waits."""
        if not self.waiting or None not in self.slots:
            return None
        adapters = min(self.waiting, key=lambda a: self._served.get(a, 0.0))
        queue = self.waiting[adapters]
        sequence = queue.popleft()
        if not queue:
            del self.waiting[adapters]
        sequence.slot = self.slots.index(None)
        self.slots[sequence.slot] = sequence
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """The sequence leaves, from its slot or from the queue."""
        if sequence.slot >= 0:
            self.slots[sequence.slot] = None
            sequence.slot = -1
            return
        queue = self.waiting.get(sequence.generation.adapters)
        if queue is not None and sequence in queue:
            queue.remove(sequence)
            if not queue:
                del self.waiting[sequence.generation.adapters]

    def charge(self, sequence: Sequence, cost: float) -> None:
        """``sequence`` was served ``cost`` weighted tokens."""
        adapters = sequence.generation.adapters
        self._served[adapters] = self._served.get(adapters, 0.0) + cost

    # -- picking -------------------------------------------------------------------------------------------

    def prefills(self, budget: int, chunk: int) -> list[Sequence]:
        """Whose prompt chunk is decoded in this step: one chunk each, ``budget`` tokens in all, at least one."""
        picked: list[Sequence] = []
        waiting = [s for s in self.slots if s is not None and s.prefilling]
        waiting.sort(key=lambda s: (self._served.get(s.generation.adapters, 0.0), s.task_id))
        for sequence in waiting:
            tokens = min(chunk, sequence.n_prompt - sequence.n_past)
            if picked and tokens > budget:
                break
            picked.append(sequence)
            budget -= tokens
        return picked

    def rows(self) -> Rows | None:
        """The span of slots from the first to the last decoding sequence; None: none decodes.

        Sequences' ids must be consecutive in a decode, else llama.cpp splits it. A gap left by a sequence
        that ended, or filled by one that is still prefilling, takes part as an empty row: that costs less
        than moving a sequence's KV cells.
        """
        decoding = self.decoding()
        if not decoding:
            return None
        first, last = decoding[0].slot, decoding[-1].slot
        span = [s if s is not None and not s.prefilling else None for s in self.slots[first : last + 1]]
        return Rows(first, tuple(span))

    def move(self) -> tuple[Sequence, int] | None:
        """The sequence to move into a lower free slot when gaps cost more than a quarter of a step; None: none."""
        decoding = self.decoding()
        if not decoding or None not in self.slots:
            return None
        span = decoding[-1].slot - decoding[0].slot + 1
        free = self.slots.index(None)
        if span - len(decoding) <= len(decoding) // 4 or free > decoding[-1].slot:
            return None
        return decoding[-1], free

    def moved(self, sequence: Sequence, slot: int) -> None:
        """Record that ``sequence``'s cells are in ``slot`` now."""
        self.slots[sequence.slot] = None
        self.slots[slot] = sequence
        sequence.slot = slot
