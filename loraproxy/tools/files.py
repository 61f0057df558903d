"""What the commands share: files that appear whole or not at all, adapters named on the command line."""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from loraproxy.adapters.names import RESERVED, shorten
from loraproxy.errors import CommandFailed

_ROOM_LEFT = 1 << 20


def check_output(path: Path, *, force: bool, inputs: tuple[Path, ...]) -> None:
    """Raises CommandFailed if ``path`` cannot or must not be written: it is one of the inputs, or there already."""
    folder = path.parent
    if not folder.is_dir():
        raise CommandFailed(f"{path}: the folder {folder} does not exist")
    if path.is_dir():
        raise CommandFailed(f"{path} is a folder; name the file to write, e.g. {path / 'OUT.gguf'}")
    for given in inputs:
        with suppress(OSError):
            if path.samefile(given):
                raise CommandFailed(f"{path} is also read; name another file to write")
    if path.exists() or path.is_symlink():
        if not force:
            raise CommandFailed(f"{path} exists; give --force to replace it")
        if not path.is_file():
            raise CommandFailed(f"{path} is not a regular file; name another file to write")
    if not os.access(folder, os.W_OK):
        raise CommandFailed(f"the folder {folder} is not writable")


def check_room(path: Path, n_bytes: int) -> None:
    """Raises CommandFailed if the disk of ``path`` has no room for ``n_bytes``."""
    free = shutil.disk_usage(path.parent).free
    if n_bytes + _ROOM_LEFT > free:
        raise CommandFailed(f"{path}: {megabytes(n_bytes)} are needed, the disk has {megabytes(free)} left")


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that becomes ``path`` when the block ends well, and is removed when not.

    Raises CommandFailed for an OSError within the block.
    """
    with temporary(path, "new") as unfinished:
        try:
            yield unfinished
            unfinished.replace(path)
        except OSError as error:
            raise CommandFailed(f"{path}: {error.strerror or error}") from None


@contextmanager
def temporary(path: Path, kind: str) -> Iterator[Path]:
    """A hidden path beside ``path`` whose file is removed when the block ends, however it ends."""
    found = path.with_name(f".{path.name[:120]}.{os.getpid()}.{kind}")
    try:
        yield found
    finally:
        found.unlink(missing_ok=True)


def existing(path: Path) -> Path:
    """``path``, if something is there. Raises CommandFailed."""
    if not exists(path):
        raise CommandFailed(f"{path}: no such file or folder")
    return path


def exists(path: Path) -> bool:
    """True if something is at ``path`` and may be looked at; never an error, whatever the path."""
    return os.path.exists(path)


def printable(text: str) -> str:
    """``text`` without what a file or a path may hold that no terminal should see, such as control characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def adapter_name(path: Path) -> str:
    """A name for the adapter at ``path``: its file's or folder's, in the alphabet of names."""
    stem = path.stem if path.suffix.lower() == ".gguf" else path.resolve().name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:100]
    return name if name and name.lower() not in RESERVED else f"adapter-{name}".rstrip("-")


def megabytes(n_bytes: int) -> str:
    """``98.4 MB``, ``1.25 GB``: a size for people, in powers of 1000."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.3g} {unit}" if n_bytes < 1000 * size else f"{n_bytes / size:.0f} {unit}"
    return f"{n_bytes} bytes"


@dataclass(frozen=True)
class ScaledAdapter:
    """An adapter's path and the scale it is applied at."""

    path: Path
    scale: float

    @classmethod
    def parse(cls, text: str) -> ScaledAdapter:
        """``PATH`` or ``PATH:SCALE``; a path that exists is taken whole, colons and all.

        Raises argparse.ArgumentTypeError, whose message argparse shows.
        """
        if not text or "\0" in text:
            raise argparse.ArgumentTypeError("an adapter is PATH or PATH:SCALE")
        path, colon, number = text.rpartition(":")
        if not colon or os.path.lexists(text):
            return cls(Path(text), 1.0)
        try:
            scale = float(number)
        except ValueError:
            if os.path.lexists(path):
                raise argparse.ArgumentTypeError(
                    f"the scale {shorten(number)} of {path} is not a number; an adapter is PATH or PATH:SCALE"
                ) from None
            return cls(Path(text), 1.0)
        if not path or not math.isfinite(scale) or scale == 0 or abs(scale) > 1e6:
            raise argparse.ArgumentTypeError(
                f"{shorten(text)}: the scale must be a finite number other than 0, as in PATH:0.5"
            )
        return cls(Path(path), scale)

    def label(self) -> str:
        """``pirate``, ``pirate:0.5``."""
        name = adapter_name(self.path)
        return name if self.scale == 1 else f"{name}:{self.scale:g}"
