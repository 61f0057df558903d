"""Reading an adapter, whatever it lies in, and finding adapters in a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.checks import MAX_FILE_BYTES, Refused, printable
from loraproxy.adapters.files import CheckedFile, Hash, opened, read_file
from loraproxy.adapters.gguf_file import plan_gguf
from loraproxy.adapters.gguf_header import GgufError
from loraproxy.adapters.names import check_name
from loraproxy.adapters.pairs import AdapterPlan, decode_in_turn, decode_pairs
from loraproxy.adapters.peft_folder import CONFIG_FILE, WEIGHTS_FILE, plan_peft, what_is_missing
from loraproxy.adapters.safetensors_header import read_safetensors_header
from loraproxy.adapters.tensors import Adapter, AdapterSummary, LoraTensor
from loraproxy.adapters.unsupported import Unsupported
from loraproxy.errors import InvalidAdapterFile

__all__ = ["Unsupported", "check_name", "read_adapter", "read_in_turn", "survey_adapter"]

_MAX_CONFIG_BYTES = 1 << 20


def read_adapter(name: str, path: Path, base: BaseModel, *, unsupported: Unsupported = Unsupported.REFUSE) -> Adapter:
    """Read the adapter at ``path``, a GGUF file or a PEFT folder, and check it against ``base``.

    Raises InvalidAdapterFile naming the adapter, the file, the tensors and the reason, and InvalidRequest for a
    bad name. Whatever the files hold, nothing else is raised.
    """
    with _source(name, path, base, unsupported) as source:
        data = source.weights.load(source.digest)
        plan = source.plan
        return Adapter(
            name=name,
            path=path,
            digest=source.digest.hexdigest(),
            source=source.format,
            tensors=decode_pairs(data, plan.pairs),
            notes=plan.notes,
            left_out=plan.left_out,
            invocation_tokens=plan.invocation_tokens,
            base_name=plan.base_name,
            size_bytes=source.size_bytes,
        )


def read_in_turn(
    name: str,
    path: Path,
    base: BaseModel,
    take: Callable[[LoraTensor], object],
    *,
    unsupported: Unsupported = Unsupported.REFUSE,
) -> str:
    """As :func:`read_adapter`, with each pair handed to ``take`` and none kept, which needs a third of the memory.

    Returns the digest. Raises as read_adapter does, and what ``take`` raises.
    """
    with _source(name, path, base, unsupported) as source:
        data = source.weights.load(source.digest)
        for pair in decode_in_turn(data, source.plan.pairs):
            take(pair)
        return source.digest.hexdigest()


def survey_adapter(
    name: str, path: Path, base: BaseModel, *, unsupported: Unsupported = Unsupported.REFUSE
) -> AdapterSummary:
    """What :func:`read_adapter` would read at ``path``, and its digest, without decoding the weights.

    Checks names, shapes, types and configuration, and raises as read_adapter does; only NaN and infinite weights,
    which the weights alone can show, are left to read_adapter.
    """
    with _source(name, path, base, unsupported) as source:
        source.weights.skim(source.digest)
        plan = source.plan
        return AdapterSummary(
            name=name,
            path=path,
            digest=source.digest.hexdigest(),
            format=source.format,
            size_bytes=source.size_bytes,
            rank=(min(pair.rank for pair in plan.pairs), max(pair.rank for pair in plan.pairs)),
            scale=(min(pair.scale for pair in plan.pairs), max(pair.scale for pair in plan.pairs)),
            targets=tuple(pair.target for pair in plan.pairs),
            resident_bytes=sum(pair.resident_bytes for pair in plan.pairs),
            notes=plan.notes,
            left_out=plan.left_out,
            invocation_tokens=plan.invocation_tokens,
            base_name=plan.base_name,
            needs_graph=any(pair.n_expert for pair in plan.pairs),
        )


@dataclass(frozen=True)
class _Source:
    """An adapter whose headers were read and found right, and the file whose rest holds its values."""

    format: str
    plan: AdapterPlan
    weights: CheckedFile
    digest: Hash
    """Of what was read so far but for ``weights``."""
    size_bytes: int


@contextmanager
def _source(name: str, path: Path, base: BaseModel, unsupported: Unsupported) -> Iterator[_Source]:
    """Open the adapter's files. Whatever goes wrong with them, within too, is an InvalidAdapterFile."""
    check_name(name)
    if "\0" in str(path):
        raise InvalidAdapterFile(f"adapter {name!r}: the path holds a null character")
    try:
        opener = _peft_source if path.is_dir() else _gguf_source
        with opener(path, base, unsupported) as source:
            yield source
    except (Refused, GgufError) as error:
        raise InvalidAdapterFile(printable(f"adapter {name!r} ({path}): {error}")) from None
    except OSError as error:
        raise InvalidAdapterFile(printable(f"adapter {name!r} ({path}): {error.strerror or error}")) from None
    except MemoryError:
        raise InvalidAdapterFile(f"adapter {name!r} ({path}): there is not enough memory to read it") from None


@contextmanager
def _gguf_source(path: Path, base: BaseModel, unsupported: Unsupported) -> Iterator[_Source]:
    if path.name in (WEIGHTS_FILE, CONFIG_FILE):
        raise Refused("this is a file of a PEFT folder; give the folder instead")
    with opened(path, MAX_FILE_BYTES) as file:
        plan = plan_gguf(file, base, unsupported)
        yield _Source("gguf", plan, file, hashlib.sha256(), file.size)


@contextmanager
def _peft_source(path: Path, base: BaseModel, unsupported: Unsupported) -> Iterator[_Source]:
    """The digest is over both files; the length of the first comes before it, so that no other split of the same
    bytes has the same digest.
    """
    if missing := what_is_missing(path):
        raise Refused(missing)
    config = read_file(path / CONFIG_FILE, _MAX_CONFIG_BYTES)
    digest = hashlib.sha256(len(config).to_bytes(8, "little"))
    digest.update(config)
    with opened(path / WEIGHTS_FILE, MAX_FILE_BYTES) as file:
        plan = plan_peft(config, read_safetensors_header(file), base, unsupported)
        yield _Source("peft", plan, file, digest, len(config) + file.size)
