"""How much of the CPUs other programs take, so that runs they disturb do not count (Linux: ``/proc``)."""

from __future__ import annotations

import os
import time
from pathlib import Path

QUIET = 0.05
"""A machine is quiet while other programs take at most this share of its CPUs."""
_PROBE_SECONDS = 1.0


class Watch:
    """Watches the CPUs from its making on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._busy, self._own = _busy_seconds(), _own_seconds(os.getpid())

    def foreign_share(self) -> float:
        """The share of all CPUs that was taken by programs other than this one and its children; 0 without /proc."""
        elapsed = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        foreign = _busy_seconds() - self._busy - (_own_seconds(os.getpid()) - self._own)
        return min(max(foreign / elapsed, 0.0), 1.0) if elapsed > 0 else 0.0


class Patience:
    """So many seconds, in all, to wait for a quiet machine."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    @property
    def left(self) -> bool:
        """Whether there is time left to wait."""
        return time.monotonic() < self._deadline

    def wait_until_quiet(self) -> None:
        """Return when the machine has been quiet for a second, or when no time is left."""
        while self.left:
            watch = Watch()
            time.sleep(_PROBE_SECONDS)
            if watch.foreign_share() <= QUIET:
                return


def _busy_seconds() -> float:
    """Seconds that the CPUs together have spent on anything since the machine started, or were taken from it."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds(pid: int) -> float:
    """CPU seconds of a process and of its descendants."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    ticks = sum(map(int, stat[11:15]))  # utime and stime, its own and those of children that ended: proc(5)
    return ticks / os.sysconf("SC_CLK_TCK") + sum(_own_seconds(int(child)) for child in children)
