"""Adapters that were uploaded: kept in a folder of their own, complete or not at all.

``FOLDER/NAME/DIGEST/`` holds ``adapter.gguf``, or a PEFT folder's two files, and ``about.json``. An upload is
written to a hidden folder beside them, checked there, and then renamed to its place.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from loraproxy.adapters.peft_folder import CONFIG_FILE

log = logging.getLogger(__name__)

GGUF_NAME = "adapter.gguf"
_ABOUT = "about.json"
_INCOMING = ".incoming-"
_FINGERPRINT_BYTES = 1 << 20


@dataclass(frozen=True)
class About:
    """What goes with an uploaded adapter's files."""

    name: str
    scale: float = 0.0
    description: str = ""


@dataclass(frozen=True)
class Stored:
    """An uploaded adapter: its file or PEFT folder, and what goes with it."""

    path: Path
    about: About


class UploadFolder:
    """The folder; it is made, for its owner alone, with the first upload."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self) -> Path:
        """A new hidden folder for the files of one upload. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=_INCOMING, dir=self.folder))

    def keep(self, incoming: Path, about: About, digest: str) -> Path:
        """Move an upload's folder to its place; the adapter's path there. Raises OSError."""
        (incoming / _ABOUT).write_text(json.dumps(asdict(about)), encoding="utf-8")
        place = self.folder / about.name / digest[:32]
        place.parent.mkdir(mode=0o700, exist_ok=True)
        if place.exists():  # the same content: requests may be reading it
            os.replace(incoming / _ABOUT, place / _ABOUT)
            self.drop(incoming)
        else:
            os.rename(incoming, place)
        return _adapter_in(place)

    def drop(self, incoming: Path) -> None:
        """Remove an upload's folder that will not be kept."""
        shutil.rmtree(incoming, ignore_errors=True)

    def forget(self, path: Path) -> None:
        """A kept adapter will be removed when its last request has ended: whatever happens, it does not come back."""
        with suppress(OSError):
            (_place_of(path) / _ABOUT).unlink()

    def remove(self, path: Path) -> None:
        """Remove a kept adapter, given what :meth:`keep` returned."""
        place = _place_of(path)
        shutil.rmtree(place, ignore_errors=True)
        with suppress(OSError):  # another version is there
            place.parent.rmdir()

    def stored(self) -> list[Stored]:
        """The kept adapters, one for each name, by name; what a server left unfinished is removed."""
        newest: dict[str, tuple[int, Stored]] = {}
        for place in self._places():
            if not (place / _ABOUT).exists() and any((place / name).exists() for name in (GGUF_NAME, CONFIG_FILE)):
                self.remove(_adapter_in(place))
                continue
            try:
                about = _read_about(place / _ABOUT)
                written = (place / _ABOUT).stat().st_mtime_ns
            except (OSError, ValueError) as error:
                log.warning("uploaded adapter %s: left alone, %s cannot be used: %s", place, _ABOUT, error)
                continue
            stored = Stored(_adapter_in(place), about)
            before = newest.get(about.name)
            if before is not None:
                old = min((before, (written, stored)), key=lambda item: item[0])[1]
                log.info("uploaded adapter %s: removing the version that was replaced", about.name)
                self.remove(old.path)
            if before is None or written >= before[0]:
                newest[about.name] = (written, stored)
        return [newest[name][1] for name in sorted(newest)]

    def _places(self) -> list[Path]:
        try:
            entries = sorted(self.folder.iterdir())
        except OSError:
            return []  # nothing was ever uploaded
        places = []
        for entry in entries:
            if entry.name.startswith(_INCOMING):
                self.drop(entry)
            elif entry.is_dir() and not entry.name.startswith("."):
                places += sorted(place for place in entry.iterdir() if place.is_dir())
        return places


def default_upload_folder(model: Path, address: str) -> Path:
    """The folder for uploads to this base model: adapters fit one base, and the file may be moved or renamed.

    ``address`` is where the server listens, since servers must not share a folder: what one deletes, another has.
    """
    digest = sha256(model.stat().st_size.to_bytes(8, "little"))
    with model.open("rb") as file:
        digest.update(file.read(_FINGERPRINT_BYTES))
    return _upload_folder(digest.hexdigest(), address)


def named_upload_folder(model: str, address: str) -> Path:
    """The folder for uploads to a base model of which there is only a name here: it is on another server."""
    return _upload_folder(sha256(model.encode()).hexdigest(), address)


def _upload_folder(digest: str, address: str) -> Path:
    home = os.environ.get("XDG_DATA_HOME", "")
    data = Path(home) if os.path.isabs(home) else Path.home() / ".local" / "share"
    return data / "loraproxy" / "uploads" / f"{digest[:16]}-{sha256(address.encode()).hexdigest()[:8]}"


def _place_of(path: Path) -> Path:
    return path.parent if path.name == GGUF_NAME else path


def _adapter_in(place: Path) -> Path:
    file = place / GGUF_NAME
    return file if file.exists() else place


def _read_about(path: Path) -> About:
    """Raises OSError, and ValueError for anything that is not ``about.json`` as it was written."""
    data: Any = json.loads(path.read_text(encoding="utf-8"))
    try:
        about = About(**data)
        return About(str(about.name), float(about.scale), str(about.description))
    except TypeError as error:
        raise ValueError(str(error)) from error
