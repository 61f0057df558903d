"""What lies in a folder of adapters, as far as names and sizes tell."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from loraproxy.adapters.fingerprint import Fingerprint, fingerprint
from loraproxy.adapters.peft_folder import CONFIG_FILE, WEIGHTS_FILE
from loraproxy.errors import InvalidRequest


@dataclass(frozen=True)
class Found:
    """An adapter's file or PEFT folder; its files may still be growing."""

    path: Path
    fingerprint: Fingerprint


@dataclass(frozen=True)
class Problem:
    """Why what could be an adapter cannot be registered; its files may still be growing."""

    reason: str
    fingerprint: Fingerprint


@dataclass(frozen=True)
class Listing:
    """The adapters of a folder by name, and by path what could be one but cannot be registered."""

    adapters: dict[str, Found] = field(default_factory=dict)
    problems: dict[str, Problem] = field(default_factory=dict)


def list_folder(folder: Path, check_name: Callable[[str], str]) -> Listing:
    """PEFT folders under their names, ``NAME.gguf`` files under NAME. Hidden entries and other files are left alone.

    A folder that is no PEFT folder and safetensors beside the folders are problems: someone meant them to be adapters.

    check_name: raises InvalidRequest for a name that no adapter may bear. Raises OSError if the folder cannot be read.
    """
    listing = Listing()

    def leave(path: Path, reason: str) -> None:
        listing.problems[str(path)] = Problem(reason, fingerprint(path))

    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if not entry.name.startswith("."))
    for entry in names:
        path = folder / entry
        if entry.endswith(".gguf") and path.is_file():
            name = entry.removesuffix(".gguf")
        elif os.path.isfile(path / CONFIG_FILE):
            name = entry
        else:
            if reason := _no_adapter(path):
                leave(path, reason)
            continue
        if name in listing.adapters:
            leave(
                path, f"{listing.adapters[name].path.name} has the same name and is used instead; rename or remove one"
            )
            continue
        try:
            check_name(name)
        except InvalidRequest as error:
            leave(path, f"{error.message}; rename it")
            continue
        listing.adapters[name] = Found(path, fingerprint(path))
    return listing


def _no_adapter(path: Path) -> str:
    """Why what was probably meant to be an adapter is none; empty for what is something else."""
    if path.suffix == ".safetensors" and path.is_file():
        return f"weights alone are no adapter; put them, as {WEIGHTS_FILE}, into a folder with their {CONFIG_FILE}"
    try:
        within = sorted(name for name in os.listdir(path) if not name.startswith("."))
    except OSError:  # a file, or a folder that is not ours to read
        return ""
    if not within:
        return ""  # something may be on its way into it
    ggufs = [name for name in within if name.endswith(".gguf")]
    hint = f"; move {ggufs[0]} out of it" if ggufs else f"; an adapter's folder has {CONFIG_FILE} and {WEIGHTS_FILE}"
    return f"the folder has no {CONFIG_FILE}{hint}"
