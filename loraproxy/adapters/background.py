"""Threads that read adapter files beside an engine that has streams to serve."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

NICENESS = 10
"""How far below the engine's threads these run, where the system has priorities for single threads."""


def background_threads(count: int) -> ThreadPoolExecutor:
    """An executor of at most ``count`` threads that yield to everything else."""
    return ThreadPoolExecutor(count, thread_name_prefix="adapters", initializer=_step_back)


def _step_back() -> None:
    # On Linux a thread id is accepted where POSIX has a process id, and only that thread gets the priority.
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
