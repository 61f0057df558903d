"""What lies in a folder of adapters, as far as names and sizes tell."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from loraproxy.adapters.fingerprint import Fingerprint, fingerprint
from loraproxy.adapters.peft_folder import CONFIG_FILE
from loraproxy.errors import InvalidRequest


@dataclass(frozen=True)
class Found:
    """An adapter's file or PEFT folder; its files may still be growing."""

    path: Path
    fingerprint: Fingerprint


@dataclass(frozen=True)
class Listing:
    """The adapters of a folder by name, and by path what could be one but cannot be registered, with the reason."""

    adapters: dict[str, Found] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def list_folder(folder: Path, check_name: Callable[[str], str]) -> Listing:
    """PEFT folders under their names, ``NAME.gguf`` files under NAME. Hidden entries and other files are left alone.

    check_name: raises InvalidRequest for a name that no adapter may bear. Raises OSError if the folder cannot be read.
    """
    listing = Listing()
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if not entry.name.startswith("."))
    for entry in names:
        path = folder / entry
        if entry.endswith(".gguf") and path.is_file():
            name = entry.removesuffix(".gguf")
        elif os.path.isfile(path / CONFIG_FILE):
            name = entry
        else:
            continue
        if name in listing.adapters:
            other = listing.adapters[name].path.name
            listing.problems[str(path)] = f"{other} has the same name and is used instead; rename or remove one"
            continue
        try:
            check_name(name)
        except InvalidRequest as error:
            listing.problems[str(path)] = f"{error.message}; rename it"
            continue
        listing.adapters[name] = Found(path, fingerprint(path))
    return listing
