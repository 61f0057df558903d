"""What went wrong under an adapter set: when it may be tried again, and what is refused until then."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loraproxy.adapters.fingerprint import Fingerprint, fingerprint
from loraproxy.adapters.registry import Bound, Version
from loraproxy.adapters.sets import AdapterSet
from loraproxy.errors import ApiError, Unavailable
from loraproxy.pool.backoff import Backoff
from loraproxy.pool.keyed_worker import named

Seen = tuple[Fingerprint, ...]
_Files = frozenset[int]


@dataclass(frozen=True)
class Patience:
    """After ``failures`` workers in a row ended before they were ready, a set is refused for ``cool_down`` seconds."""

    failures: int = 3
    cool_down: float = 30.0


@dataclass(eq=False)
class _Trouble:
    failures: int = 0
    """In a row, whether they were ready or not."""
    never_ready: int = 0
    """In a row, before they were ready."""
    retry_at: float = 0.0
    last_words: str = ""


class Troubles:
    """Failures by adapter set; times are the pool's clock's, in seconds."""

    def __init__(self, backoff: Backoff, patience: Patience) -> None:
        self._backoff = backoff
        self._patience = patience
        self._troubles: dict[AdapterSet, _Trouble] = {}
        self._refused: dict[_Files, tuple[Seen, ApiError]] = {}

    def died(self, adapters: AdapterSet, words: str, now: float, ready_for: float) -> None:
        """A worker ended by itself after it was ready for ``ready_for`` seconds."""
        if ready_for >= self._backoff.healthy_after:
            self._troubles.pop(adapters, None)
        self._failed(adapters, words, now)

    def never_ready(self, bound: Bound, words: str, now: float) -> bool:
        """A worker ended before it was ready for the set. True when the set is refused from now on."""
        trouble = self._failed(bound.adapters, words, now)
        trouble.never_ready += 1
        if trouble.never_ready >= self._patience.failures:
            trouble.retry_at = now + self._patience.cool_down
            return True
        return False

    def was_ready(self, adapters: AdapterSet) -> None:
        """A worker has the set: what ended before it was ready no longer counts."""
        if (trouble := self._troubles.get(adapters)) is not None:
            trouble.never_ready = 0
        self._refused.pop(_files(adapters), None)

    def retry_at(self, adapters: AdapterSet) -> float:
        """Before this time no worker is to be given the set."""
        trouble = self._troubles.get(adapters)
        return trouble.retry_at if trouble else -math.inf

    def failures(self, adapters: AdapterSet) -> int:
        """How many workers in a row failed under the set."""
        trouble = self._troubles.get(adapters)
        return trouble.failures if trouble else 0

    def last_words(self, adapters: AdapterSet) -> str:
        """What the last one that failed under the set said; empty: none did."""
        trouble = self._troubles.get(adapters)
        return trouble.last_words if trouble else ""

    def check(self, bound: Bound, now: float) -> None:
        """Raises Unavailable while no worker may be tried, and what a worker said of the set's files as they are."""
        trouble = self._troubles.get(bound.adapters)
        if trouble and trouble.never_ready >= self._patience.failures and now < trouble.retry_at:
            raise self.unavailable(bound, now)
        if (error := self.refusal(bound)) is not None:
            raise error.with_traceback(None)

    def refusal(self, bound: Bound) -> ApiError | None:
        """Why a worker did not run the set, if its files are still what they were."""
        files = _files(bound.adapters)
        if (refused := self._refused.get(files)) is None:
            return None
        seen, error = refused
        if seen == fingerprints(bound):
            return error
        del self._refused[files]
        return None

    def unavailable(self, bound: Bound, now: float) -> Unavailable:
        """The error of a set that is refused, with its workers' last words."""
        trouble = self._troubles[bound.adapters]
        return Unavailable(
            f"no worker can run {named(bound)}: {trouble.last_words} ({trouble.never_ready} times in a row);"
            " try again later",
            retry_after=max(math.ceil(trouble.retry_at - now), 1),
        )

    def refused(self, bound: Bound, error: ApiError, seen: Seen, now: float) -> None:
        """A worker does not run the set, at any scale: it is tried again when its files are no longer as ``seen``."""
        if bound.versions:
            self._refused[_files(bound.adapters)] = (seen, error)
        else:
            self._failed(bound.adapters, error.message, now)

    def failure(self, version: Version) -> str:
        """Why ``version`` by itself cannot be applied; else empty."""
        refused = self._refused.get(frozenset((version.wire_id,)))
        return refused[1].message if refused else ""

    def forget(self, version: Version) -> None:
        """Nothing will ask for ``version`` any more."""
        gone = version.wire_id
        self._troubles = {key: trouble for key, trouble in self._troubles.items() if gone not in _files(key)}
        self._refused = {files: refused for files, refused in self._refused.items() if gone not in files}

    def _failed(self, adapters: AdapterSet, words: str, now: float) -> _Trouble:
        # Scales make any number of sets: those whose time of health has passed since are forgotten.
        oldest = now - self._backoff.healthy_after
        self._troubles = {k: t for k, t in self._troubles.items() if k == adapters or t.retry_at > oldest}
        trouble = self._troubles.setdefault(adapters, _Trouble())
        trouble.failures += 1
        trouble.last_words = words
        trouble.retry_at = now + self._backoff.delay(trouble.failures)
        return trouble


def fingerprints(bound: Bound) -> Seen:
    """What the files of the set are now."""
    return tuple(fingerprint(version.path) for version in bound.versions)


def _files(adapters: AdapterSet) -> _Files:
    return frozenset(wire_id for wire_id, _ in adapters.entries)
