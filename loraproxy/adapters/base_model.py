"""What must be known of a base model to read adapters for it, taken from the header of its GGUF file alone."""

from __future__ import annotations

import mmap
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gguf import GGML_QUANT_SIZES

from loraproxy.adapters.gguf_header import GgufArray, GgufError, GgufHeader, read_gguf_header
from loraproxy.errors import InvalidRequest

TOKEN_EMBD = "token_embd.weight"
OUTPUT = "output.weight"

_MAX_LAYERS = 1024
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class BaseModel:
    """A base model as an adapter sees it.

    n_head, n_head_kv: attention heads of each layer; empty where the file does not say.
    tensors: GGUF tensor name to shape in numpy order, (n_out, n_in) for a weight matrix.
    quantised: those whose type packs several values into a block.
    """

    path: Path
    architecture: str
    name: str
    n_layer: int
    n_vocab: int
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    tensors: Mapping[str, tuple[int, ...]]
    quantised: frozenset[str] = frozenset()

    @classmethod
    def from_gguf(cls, path: Path) -> BaseModel:
        """Read the header of a GGUF model, all parts of a split one. Raises InvalidRequest with the reason."""
        try:
            headers = _headers(path)
            return _from_headers(path, headers)
        except GgufError as error:
            raise InvalidRequest(f"base model {path}: {error}") from None
        except OSError as error:
            raise InvalidRequest(f"base model {path}: {error.strerror or error}") from None

    @property
    def tied_output(self) -> bool:
        """True when the output head is the token embedding, so that the file has no ``output.weight``."""
        return OUTPUT not in self.tensors

    def shape_of(self, target: str) -> tuple[int, ...] | None:
        """The shape of a tensor that an adapter may target; a tied head answers to ``output.weight``. None: unknown."""
        return self.tensors.get(self._stored(target))

    def is_quantised(self, target: str) -> bool:
        """Whether the weight that an adapter may target is; adapters' own are kept in 8 bits there."""
        return self._stored(target) in self.quantised

    def _stored(self, target: str) -> str:
        return TOKEN_EMBD if target == OUTPUT and self.tied_output else target

    def describe(self) -> str:
        """For messages: ``llama model 'Smollm2 135M'``, or with the file's name where the model has none."""
        return (
            f"{self.architecture} model {self.name!r}" if self.name else f"{self.architecture} model {self.path.name}"
        )


def _headers(path: Path) -> list[GgufHeader]:
    first = _header(path)
    n_split = first.count("split.count")
    if n_split <= 1:
        return [first]
    match = _SPLIT_NAME.fullmatch(path.name)
    if not match or int(match[2]) != 1 or int(match[3]) != n_split:
        raise GgufError(f"one part of a model split into {n_split}; name the first, NAME-00001-of-{n_split:05}.gguf")
    rest = [path.with_name(f"{match[1]}-{i:05}-of-{n_split:05}.gguf") for i in range(2, n_split + 1)]
    return [first, *(_header(part) for part in rest)]


def _header(path: Path) -> GgufHeader:
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for a writer
        raise GgufError(f"{path.name} is not a regular file; give a GGUF file")
    with path.open("rb") as file:
        try:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise GgufError("the file is empty") from None
        with mapped:
            return read_gguf_header(mapped)


def _from_headers(path: Path, headers: list[GgufHeader]) -> BaseModel:
    head = headers[0]
    if (kind := head.text("general.type")) not in ("", "model"):
        raise GgufError(f"general.type is {kind!r}; a base model has 'model' (is this an adapter?)")
    architecture = head.text("general.architecture")
    if not architecture:
        raise GgufError("general.architecture is missing")
    tensors = {name: tensor.shape for header in headers for name, tensor in header.tensors.items()}
    n_layer = head.count(f"{architecture}.block_count")
    if n_layer > _MAX_LAYERS:
        raise GgufError(f"{architecture}.block_count is {n_layer}; at most {_MAX_LAYERS} layers are supported")
    if len(tensors.get(TOKEN_EMBD, ())) != 2:
        raise GgufError(f"there is no {TOKEN_EMBD}: not a language model")
    n_head = _per_layer(head, f"{architecture}.attention.head_count", n_layer)
    return BaseModel(
        path=path,
        architecture=architecture,
        name=head.text("general.name"),
        n_layer=n_layer,
        n_vocab=tensors[TOKEN_EMBD][0],
        n_head=n_head,
        # absent means no grouped-query attention (llama-model.cpp)
        n_head_kv=_per_layer(head, f"{architecture}.attention.head_count_kv", n_layer) or n_head,
        tensors=tensors,
        quantised=frozenset(
            name
            for header in headers
            for name, tensor in header.tensors.items()
            if GGML_QUANT_SIZES[tensor.type][0] > 1
        ),
    )


def _per_layer(header: GgufHeader, key: str, n_layer: int) -> tuple[int, ...]:
    """A number for each layer, given as one number or as an array; empty if absent."""
    value = header.metadata.get(key)
    if value is None:
        return ()
    if isinstance(value, GgufArray):
        values = tuple(v for v in value.values if isinstance(v, int) and v >= 0)
        if len(values) != n_layer:
            raise GgufError(f"{key} must hold {n_layer} whole numbers, one for each layer")
        return values
    return (header.count(key),) * n_layer
