"""Models as Ollama keeps them: blobs by digest, and for every name a manifest that lists blobs as its layers."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from loraproxy.adapters.gguf_header import GgufError, GgufHeader, read_gguf_header

from .names import Name, blob_file
from .refusals import Refusal

_TYPE = "application/vnd.ollama.image."
MODEL, ADAPTER, TEMPLATE, SYSTEM, PARAMS, MESSAGES, LICENSE = (
    _TYPE + kind for kind in ("model", "adapter", "template", "system", "params", "messages", "license")
)
_CONFIG = "application/vnd.docker.container.image.v1+json"
_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_QUANTISATIONS = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 15: "Q4_K_M", 32: "BF16"}

Layer = dict[str, Any]
"""``mediaType``, ``digest``, ``size``."""


@dataclass(frozen=True)
class Model:
    """A model of the store."""

    name: Name
    manifest: Mapping[str, Any]
    digest: str
    modified: float
    store: Store

    @property
    def layers(self) -> list[Layer]:
        """The layers in their order."""
        return list(self.manifest["layers"])

    @property
    def size(self) -> int:
        """Bytes of all layers and the config."""
        return sum(int(layer["size"]) for layer in [*self.layers, self.manifest["config"]])

    def paths(self, kind: str) -> list[Path]:
        """The blobs of the layers of one media type."""
        return [self.store.blob(layer["digest"]) for layer in self.layers if layer["mediaType"] == kind]

    def texts(self, kind: str) -> list[str]:
        """The same as texts."""
        return [path.read_text() for path in self.paths(kind)]

    def document(self, kind: str, default: Any) -> Any:
        """The last layer of one media type as JSON."""
        return json.loads(texts[-1]) if (texts := self.texts(kind)) else default

    @cached_property
    def header(self) -> GgufHeader:
        """The GGUF header of the model itself."""
        return read_header(self.paths(MODEL)[-1])

    @property
    def details(self) -> dict[str, Any]:
        """The ``details`` of lists and of ``/api/show``."""
        config = json.loads(self.store.blob(self.manifest["config"]["digest"]).read_text())
        return {
            "parent_model": "",
            "format": config["model_format"],
            "family": config["model_family"],
            "families": config["model_families"],
            "parameter_size": config["model_type"],
            "quantization_level": config["file_type"],
        }


class Store:
    """The folder with ``blobs`` and ``manifests``."""

    def __init__(self, folder: Path) -> None:
        self._blobs = folder / "blobs"
        self._manifests = folder / "manifests"
        for part in (self._blobs, self._manifests):
            part.mkdir(parents=True, exist_ok=True)
        self._prune()

    def blob(self, digest: str) -> Path:
        """Where the blob lies, if it is there."""
        return self._blobs / blob_file(digest)

    def find(self, text: str) -> Model | None:
        """The model that ``text`` names, whatever its case."""
        name = Name.parse(text)
        return next((model for model in self if name and str(model.name).lower() == str(name).lower()), None)

    def __iter__(self) -> Iterator[Model]:
        for path in sorted(self._manifests.glob("*/*/*/*")):
            data = path.read_bytes()
            name = Name(*path.relative_to(self._manifests).parts)
            yield Model(name, json.loads(data), hashlib.sha256(data).hexdigest(), path.stat().st_mtime, self)

    def add_bytes(self, data: bytes, kind: str) -> Layer:
        """A layer with this content."""
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blob(digest).write_bytes(data)
        return self.layer(digest, kind)

    def add_file(self, path: Path, kind: str) -> Layer:
        """A layer with a file's content, linked where that works."""
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        blob = self.blob(digest)
        if not blob.exists():
            try:
                os.link(path, blob)
            except OSError:
                shutil.copyfile(path, blob)
        return self.layer(digest, kind)

    def layer(self, digest: str, kind: str) -> Layer:
        """A layer of a blob that is there."""
        return {"mediaType": kind, "digest": digest.lower(), "size": self.blob(digest).stat().st_size}

    def write(self, name: Name, layers: Sequence[Layer]) -> None:
        """Make or replace the model ``name``; layers of the one it replaces that nothing else needs are removed."""
        header = read_header(next(self.blob(x["digest"]) for x in reversed(layers) if x["mediaType"] == MODEL))
        architecture = header.text("general.architecture")
        file_type = header.count("general.file_type")
        config = {
            "model_format": "gguf",
            "model_family": architecture,
            "model_families": [architecture],
            "model_type": human_number(parameter_count(header)),
            "file_type": _QUANTISATIONS.get(file_type, "unknown"),
            "architecture": "amd64",
            "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": self.add_bytes(json.dumps(config).encode(), _CONFIG),
            "layers": list(layers),
        }
        replaced = self.find(str(name))
        self._write(name, json.dumps(manifest).encode())
        if replaced is not None:
            self._remove_unused(replaced)

    def copy(self, source: Model, name: Name) -> None:
        """The same model under another name."""
        self._write(name, json.dumps(source.manifest).encode())

    def remove(self, model: Model) -> None:
        """Remove a model, and its layers that no other model has."""
        self._path(model.name).unlink()
        self._remove_unused(model)

    def _remove_unused(self, model: Model) -> None:
        used = self._used()
        for layer in [*model.layers, model.manifest["config"]]:
            if blob_file(layer["digest"]) not in used:
                self.blob(layer["digest"]).unlink(missing_ok=True)

    def _path(self, name: Name) -> Path:
        return self._manifests / name.host / name.namespace / name.model / name.tag

    def _write(self, name: Name, data: bytes) -> None:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def _used(self) -> set[str]:
        return {blob_file(layer["digest"]) for model in self for layer in [*model.layers, model.manifest["config"]]}

    def _prune(self) -> None:
        """Remove blobs that no model has: what was uploaded but not used yet is lost with a restart, as in Ollama."""
        used = self._used()
        for blob in self._blobs.iterdir():
            if blob.name not in used:
                blob.unlink()


def read_header(path: Path) -> GgufHeader:
    """The header of a GGUF file. Raises Refusal for anything else."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise Refusal(400, "supplied file was not in GGUF format")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            try:
                return read_gguf_header(mapped)
            except GgufError as error:
                raise Refusal(400, str(error)) from None


def parameter_count(header: GgufHeader) -> int:
    """All weights of all tensors."""
    total = 0
    for tensor in header.tensors.values():
        weights = 1
        for size in tensor.shape:
            weights *= size
        total += weights
    return total


def human_number(value: int) -> str:
    """``134.52M``, ``1.1B``: format.HumanNumber."""
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if value >= limit:
            digits = 1 if unit == "B" else 2
            return f"{value / limit:.{digits}f}{unit}"
    return str(value)
