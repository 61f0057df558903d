"""Whether an adapter's files are the ones that were seen before, without reading them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from loraproxy.adapters.peft_folder import CONFIG_FILE, WEIGHTS_FILE

Fingerprint = tuple[tuple[int, int, int, int], ...]
"""Device, inode, size and mtime in nanoseconds of each file that defines the adapter; empty where there is none."""


def fingerprint(path: Path | str) -> Fingerprint:
    """Of a GGUF file or a PEFT folder; of whatever is there. Never raises OSError."""
    found = _stat(path)
    if found is None:
        return ()
    if not stat.S_ISDIR(found.st_mode):
        return (_identity(found),)
    files = (_stat(os.path.join(path, name)) for name in (CONFIG_FILE, WEIGHTS_FILE))
    return tuple((0, 0, 0, 0) if file is None else _identity(file) for file in files)


def file_bytes(found: Fingerprint) -> int:
    """The files' sizes, added up."""
    return sum(size for _, _, size, _ in found)


def _identity(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _stat(path: Path | str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (OSError, ValueError):  # ValueError: a null character in the path
        return None
