"""The base model of an Ollama server as adapters see it, from what the server says of it: no file is needed here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loraproxy.adapters.base_model import TOKEN_EMBD, BaseModel
from loraproxy.backends.ollama_api import OllamaClient
from loraproxy.errors import ServerError


async def base_model(client: OllamaClient, model: str) -> BaseModel:
    """What :meth:`BaseModel.from_gguf` would read from the file of ``model``.

    Raises NotFound for a model that the server does not have, ServerError if it does not say enough (releases of
    before 2025 do not list tensors).
    """
    return base_model_of(model, await client.show(model, verbose=True))


def base_model_of(model: str, shown: Mapping[str, Any]) -> BaseModel:
    """The base model that an answer of ``/api/show`` with ``verbose`` describes. Raises ServerError.

    ``model_info`` is the GGUF's metadata, ``tensors`` a list of ``name``, ``type`` and ``shape``, the shape as the file
    has it: the length of a row first.
    """
    info = shown.get("model_info") or {}
    architecture = info.get("general.architecture")
    tensors = {
        str(tensor["name"]): tuple(int(size) for size in reversed(tensor["shape"]))
        for tensor in shown.get("tensors") or []
    }
    if not isinstance(architecture, str) or not architecture:
        raise ServerError(
            f"Ollama does not say which architecture {model!r} has; is it a GGUF model kept on the server?"
        )
    if len(tensors.get(TOKEN_EMBD, ())) != 2:
        raise ServerError(
            f"Ollama does not list the tensors of {model!r}, without which adapters cannot be checked; update Ollama"
        )
    n_layer = info.get(f"{architecture}.block_count", 0)
    n_head = _per_layer(info.get(f"{architecture}.attention.head_count"), n_layer)
    n_head_kv = _per_layer(info.get(f"{architecture}.attention.head_count_kv"), n_layer)
    return BaseModel(
        path=Path(model),
        architecture=architecture,
        name=model,
        n_layer=n_layer,
        n_vocab=tensors[TOKEN_EMBD][0],
        n_head=n_head,
        n_head_kv=n_head_kv or n_head,
        tensors=tensors,
    )


def _per_layer(value: Any, n_layer: int) -> tuple[int, ...]:
    """A number for each layer, given as one or as a list; empty if absent or not of that length."""
    if isinstance(value, int):
        return (value,) * n_layer
    values = tuple(value) if isinstance(value, list) else ()
    return values if len(values) == n_layer else ()
