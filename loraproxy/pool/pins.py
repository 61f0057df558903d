"""Which versions requests run or wait under."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from loraproxy.adapters.registry import Version


@dataclass(eq=False)
class _Pin:
    count: int = 0
    last_used: float = 0.0
    unused: asyncio.Event = field(default_factory=asyncio.Event)


class Pins:
    """Counts requests by version, and tells when the last of a version has ended."""

    def __init__(self) -> None:
        self._pins: dict[int, _Pin] = {}

    @contextmanager
    def hold(self, versions: Sequence[Version]) -> Iterator[None]:
        """One more request runs under ``versions`` until the block ends."""
        pins = [self._pins.setdefault(version.wire_id, _Pin()) for version in versions]
        for pin in pins:
            pin.count += 1
            pin.last_used = time.time()
            pin.unused.clear()
        try:
            yield
        finally:
            for pin in pins:
                pin.count -= 1
                pin.last_used = time.time()
                if not pin.count:
                    pin.unused.set()

    async def until_unused(self, version: Version) -> None:
        """Return when no request runs under ``version`` or waits to, and forget it."""
        if (pin := self._pins.get(version.wire_id)) is not None:
            await pin.unused.wait()
        self._pins.pop(version.wire_id, None)

    def count(self, version: Version) -> int:
        """Requests that run under ``version`` or wait to."""
        pin = self._pins.get(version.wire_id)
        return pin.count if pin else 0

    def last_used(self, version: Version) -> float | None:
        """When a request last began or ended under ``version`` (seconds since the epoch); None: never."""
        pin = self._pins.get(version.wire_id)
        return pin.last_used if pin else None
