"""What Ollama's lists say: the base model and every adapter as models, over any worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.names import BASE_WORD
from loraproxy.adapters.registry import RegisteredAdapter
from loraproxy.errors import NotFound
from loraproxy.proxy.catalog import Checks
from loraproxy.proxy.context import Proxy
from loraproxy.proxy.control import fetch_json
from loraproxy.proxy.ollama_answers import ModelFacts, human_number

_STARTED = datetime.now(timezone.utc)
"""Shown for what has no file here to ask for its time."""


def check_known(proxy: Proxy, name: str, model: str) -> None:
    """Raises NotFound in Ollama's words, with ``name`` as the client wrote it, unless ``model`` is base or adapter."""
    base, _, adapter = model.rpartition(":")
    known = model in proxy.base_names or model in proxy.registry
    if not known and not (base in proxy.base_names and (adapter in proxy.registry or adapter == BASE_WORD)):
        raise NotFound(f"model '{name[:200]}' not found")


def named_adapter(proxy: Proxy, model: str) -> RegisteredAdapter | None:
    """The adapter that a known model name means; None: the base model."""
    for name in () if model in proxy.base_names else (model, model.rpartition(":")[2]):
        if name in proxy.registry:
            return proxy.registry.by_name(name)
    return None


@dataclass(frozen=True)
class BaseFacts:
    """The base model, as its worker describes it."""

    facts: ModelFacts
    meta: Mapping[str, Any]
    """llama-server's ``meta`` of it."""

    @property
    def context_length(self) -> int:
        """Tokens of one request; 0: unknown."""
        return int(self.meta.get("n_ctx") or 0)

    def model_info(self) -> dict[str, Any]:
        """What is known of the GGUF's metadata."""
        architecture = self.facts.family
        known = {
            "general.architecture": architecture or None,
            "general.parameter_count": self.meta.get("n_params"),
            f"{architecture}.context_length": self.meta.get("n_ctx_train"),
            f"{architecture}.embedding_length": self.meta.get("n_embd"),
            f"{architecture}.vocab_size": self.meta.get("n_vocab"),
        }
        return {key: value for key, value in known.items() if value is not None}

    def adapter(self, adapter: RegisteredAdapter) -> ModelFacts:
        """An adapter on this base."""
        version = adapter.version
        return replace(
            self.facts,
            name=adapter.name,
            digest=version.summary.digest if version else _digest_of(str(adapter.path)),
            size=version.summary.size_bytes if version else 0,
            modified_at=_modified(adapter.path),
            parent_model=self.facts.name,
        )


async def base_facts(proxy: Proxy) -> BaseFacts:
    """Ask a worker for its model. Raises Unavailable, WorkerFailed."""
    listing = await fetch_json(proxy, "/v1/models")
    data, shown = listing["data"][0], (listing.get("models") or [{}])[0]
    meta, details = data.get("meta") or {}, shown.get("details") or {}
    checks = proxy.catalog.checks
    base: BaseModel | None = checks.base if isinstance(checks, Checks) else None
    size = int(meta.get("size") or shown.get("size") or 0)
    n_params = meta.get("n_params")
    name = _public_name(proxy, str(data["id"]))
    facts = ModelFacts(
        name=name,
        digest=str(shown.get("digest") or _digest_of(f"{name} {size}")),
        size=size,
        modified_at=_modified(base.path) if base else _STARTED,
        family=str(details.get("family") or (base.architecture if base else "")),
        parameter_size=str(details.get("parameter_size") or (human_number(int(n_params)) if n_params else "")),
        quantization_level=str(details.get("quantization_level") or meta.get("ftype") or ""),
    )
    return BaseFacts(facts, meta)


async def template(proxy: Proxy) -> str:
    """The chat template; empty where the worker shows none."""
    return str((await fetch_json(proxy, "/props")).get("chat_template") or "")


def _public_name(proxy: Proxy, worker_says: str) -> str:
    """A name that selects the base model: the one in the worker's answers where it does and is no path."""
    if not proxy.base_names or (worker_says in proxy.base_names and "/" not in worker_says):
        return worker_says
    return min(proxy.base_names, key=lambda name: (len(name), name))


def _modified(path: Path) -> datetime:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
    except (OSError, ValueError):
        return _STARTED


def _digest_of(text: str) -> str:
    """In the place of a digest of contents that nobody has read."""
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
