"""Keeping the C library's heap small, where several workers stand side by side on one machine."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Of glibc's malloc.h."""
_MIB = 1 << 20


def keep_heap_small() -> None:
    """One arena for all threads, and large blocks apart from it, so that what is freed goes back to the system.

    glibc gives threads arenas of their own, where what remains of a model's or an adapter's load is kept for the
    next: tens of MB. To be called before there are threads. Nothing happens where the C library is another.
    """
    mallopt = _function("mallopt")
    if mallopt is not None:
        for parameter, value in ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, _MIB), (_M_TRIM_THRESHOLD, _MIB)):
            mallopt(parameter, value)


def give_back_free_memory() -> None:
    """Return whole free pages within the heap to the system. Takes milliseconds, with the heap locked."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _function(name: str) -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
