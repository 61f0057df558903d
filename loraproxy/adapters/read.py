"""Reading an adapter, whatever it lies in, and finding adapters in a folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.checks import MAX_FILE_BYTES, Refused
from loraproxy.adapters.files import read_file
from loraproxy.adapters.gguf_file import pairs_from_gguf
from loraproxy.adapters.gguf_header import GgufError
from loraproxy.adapters.names import check_name
from loraproxy.adapters.peft_folder import CONFIG_FILE, WEIGHTS_FILE, pairs_from_peft
from loraproxy.adapters.tensors import Adapter, AdapterSummary
from loraproxy.adapters.unsupported import Unsupported
from loraproxy.errors import InvalidAdapterFile, InvalidRequest

__all__ = ["Unsupported", "check_name", "read_adapter", "scan_adapters_dir", "survey_adapter"]

_MAX_CONFIG_BYTES = 1 << 20


def read_adapter(name: str, path: Path, base: BaseModel, *, unsupported: Unsupported = Unsupported.REFUSE) -> Adapter:
    """Read the adapter at ``path``, a GGUF file or a PEFT folder, and check it against ``base``.

    Raises InvalidAdapterFile naming the adapter, the file, the tensors and the reason, and InvalidRequest for a
    bad name. Whatever the files hold, nothing else is raised.
    """
    check_name(name)
    if "\0" in str(path):
        raise InvalidAdapterFile(f"adapter {name!r}: the path holds a null character")
    try:
        return _read_peft(name, path, base) if path.is_dir() else _read_gguf(name, path, base)
    except (Refused, GgufError) as error:
        raise InvalidAdapterFile(f"adapter {name!r} ({path}): {error}") from None
    except OSError as error:
        raise InvalidAdapterFile(f"adapter {name!r} ({path}): {error.strerror or error}") from None
    except MemoryError:
        raise InvalidAdapterFile(f"adapter {name!r} ({path}): there is not enough memory to read it") from None


def survey_adapter(
    name: str, path: Path, base: BaseModel, *, unsupported: Unsupported = Unsupported.REFUSE
) -> AdapterSummary:
    """What :func:`read_adapter` would read at ``path``, and its digest, without decoding the weights.

    Checks names, shapes, types and configuration, and raises as read_adapter does; only NaN and infinite weights,
    which the weights alone can show, are left to read_adapter.
    """
    return read_adapter(name, path, base, unsupported=unsupported).summary


def scan_adapters_dir(folder: Path) -> list[tuple[str, Path]]:
    """The adapters in ``folder``, sorted by name: PEFT folders by their name, ``NAME.gguf`` files by NAME.

    Hidden entries and other files are left alone. Raises InvalidRequest if the folder cannot be read, a name is
    not allowed, or one appears twice.
    """
    found: dict[str, Path] = {}
    try:
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise InvalidRequest(f"adapters folder {folder}: {error.strerror or error}") from None
    for entry in entries:
        if (entry / CONFIG_FILE).is_file():
            name = entry.name
        elif entry.suffix == ".gguf" and entry.is_file():
            name = entry.stem
        else:
            continue
        try:
            check_name(name)
        except InvalidRequest as error:
            raise InvalidRequest(f"adapters folder {folder}: {error.message}; rename {entry.name}") from None
        if name in found:
            raise InvalidRequest(f"adapters folder {folder}: {found[name].name} and {entry.name} have the same name")
        found[name] = entry
    return sorted(found.items())


def _read_gguf(name: str, path: Path, base: BaseModel) -> Adapter:
    data = read_file(path, MAX_FILE_BYTES)
    if path.name in (WEIGHTS_FILE, CONFIG_FILE):
        raise Refused("this is a file of a PEFT folder; give the folder instead")
    tensors, notes = pairs_from_gguf(data, base)
    return Adapter(name, path, hashlib.sha256(data).hexdigest(), "gguf", tensors, notes, size_bytes=len(data))


def _read_peft(name: str, path: Path, base: BaseModel) -> Adapter:
    if not (path / CONFIG_FILE).exists():
        raise Refused(f"the folder has no {CONFIG_FILE}; give a GGUF file or a PEFT folder")
    if not (path / WEIGHTS_FILE).exists():
        if (path / "adapter_model.bin").exists():
            raise Refused(
                "the weights are pickled (adapter_model.bin), and unpickling can run code; load the adapter with PEFT "
                "and save it with save_pretrained(..., safe_serialization=True)"
            )
        raise Refused(f"the folder has no {WEIGHTS_FILE}")
    config = read_file(path / CONFIG_FILE, _MAX_CONFIG_BYTES)
    weights = read_file(path / WEIGHTS_FILE, MAX_FILE_BYTES)
    tensors, notes = pairs_from_peft(config, weights, base)
    size = len(config) + len(weights)
    return Adapter(name, path, _digest(config, weights), "peft", tensors, notes, size_bytes=size)


def _digest(config: bytes, weights: bytes) -> str:
    """SHA-256 over both files; the length first, so that no other split of the same bytes has the same digest."""
    digest = hashlib.sha256(len(config).to_bytes(8, "little"))
    digest.update(config)
    digest.update(weights)
    return digest.hexdigest()
