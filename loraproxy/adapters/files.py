"""Reading files that nobody vouches for, hashed as they are read."""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Protocol

from loraproxy.adapters.checks import Refused

_CHUNK = 256 * 1024
"""Small enough for a processor's second-level cache, so that hashing finds what reading has just put there."""


class Hash(Protocol):
    """A hashlib object."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Take in more data."""

    def hexdigest(self) -> str:
        """The hash of everything taken in, in hex."""


class CheckedFile:
    """A regular file of bounded size, read from its beginning exactly once.

    :meth:`head` gives the first bytes; then either :meth:`load` keeps the whole content or :meth:`skim` only
    hashes it. What was parsed is therefore what is hashed, whoever writes to the file meanwhile.
    """

    def __init__(self, file: FileIO, name: str, status: os.stat_result) -> None:
        self._file = file
        self._status = status
        self._head = b""
        self.name = name
        self.size = status.st_size

    def head(self, n_bytes: int) -> bytes:
        """The first ``n_bytes``, or more if more are known already, or all if the file is shorter.

        Raises Refused if it shrinks.
        """
        wanted = min(n_bytes, self.size) - len(self._head)
        if wanted > 0:
            rest = bytearray(wanted)
            self._fill(memoryview(rest))
            self._head += rest
        return self._head

    def load(self, digest: Hash) -> memoryview:
        """The whole content, read-only, each byte given to ``digest``. Raises Refused if the file changes meanwhile."""
        if not self.size:
            return memoryview(b"")
        # pages of its own, which can go one by one (see `release`): not so if they were shared
        content = memoryview(mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        known = len(self._head)
        content[:known] = self._head
        digest.update(content[:known])
        for at in range(known, self.size, _CHUNK):
            chunk = content[at : at + _CHUNK]
            self._fill(chunk)
            digest.update(chunk)
        self._check_unchanged()
        return content.toreadonly()

    def skim(self, digest: Hash) -> None:
        """Give the whole content to ``digest`` and keep nothing. Raises Refused if the file changes meanwhile."""
        digest.update(self._head)
        buffer = memoryview(bytearray(min(_CHUNK, self.size)))
        for at in range(len(self._head), self.size, _CHUNK):
            chunk = buffer[: min(_CHUNK, self.size - at)]
            self._fill(chunk)
            digest.update(chunk)
        self._check_unchanged()

    def _fill(self, buffer: memoryview) -> None:
        while buffer:
            n_read = self._file.readinto(buffer)
            if not n_read:
                raise Refused(f"{self.name} became shorter while it was read; try again when it is complete")
            buffer = buffer[n_read:]

    def _check_unchanged(self) -> None:
        now = os.fstat(self._file.fileno())
        if (now.st_size, now.st_mtime_ns) != (self._status.st_size, self._status.st_mtime_ns):
            raise Refused(f"{self.name} changed while it was read; try again when it is complete")


def release(content: bytes | memoryview, at: int, n_bytes: int) -> None:
    """Give the pages of this part of a loaded content back to the system: nobody will look at it again."""
    pages = content.obj if isinstance(content, memoryview) else None
    if isinstance(pages, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        first = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (at + n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            pages.madvise(mmap.MADV_DONTNEED, first, last - first)


@contextmanager
def opened(path: Path, limit: int) -> Iterator[CheckedFile]:
    """Open a regular file of at most ``limit`` bytes. Raises Refused with the reason.

    Nothing but a regular file is opened: to open a pipe would wait for its writer, to open a device may do anything.
    """
    try:
        _check_regular(path.name, path.stat(), limit)
        # should a pipe take the file's place between the two, opening it does not wait
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Refused(f"{path.name}: {error.strerror or error}") from None
    with FileIO(descriptor, "r") as file:
        try:
            status = os.fstat(descriptor)
            _check_regular(path.name, status, limit)
            yield CheckedFile(file, path.name, status)
        except OSError as error:
            raise Refused(f"{path.name}: {error.strerror or error}") from None


def read_file(path: Path, limit: int) -> bytes:
    """The content of a small regular file of at most ``limit`` bytes. Raises Refused with the reason."""
    with opened(path, limit) as file:
        return bytes(file.load(hashlib.sha256()))


def _check_regular(name: str, status: os.stat_result, limit: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise Refused(f"{name} is not a regular file")
    if status.st_size > limit:
        raise Refused(f"{name} has {status.st_size} bytes; at most {limit} are supported")
