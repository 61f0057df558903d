"""Laying out the proxy in front of an Ollama server: what its model is, and who serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loraproxy.adapters.read import Unsupported
from loraproxy.adapters.uploads import named_upload_folder
from loraproxy.backends.ollama import OllamaBackend, OllamaSettings, look
from loraproxy.backends.ollama_api import DEFAULT_TAG, DEFAULT_URL, full_name
from loraproxy.config import Config
from loraproxy.proxy import generate, ollama_native
from loraproxy.proxy.catalog import Checks

HANDLERS = {
    ("POST", "/v1/embeddings"): generate.generate,
    ("POST", "/api/generate"): ollama_native.run,
    ("POST", "/api/chat"): ollama_native.run,
    ("POST", "/api/embed"): ollama_native.run,
    ("POST", "/api/show"): ollama_native.show,
}
"""Method and path to handler: what is served beside, or otherwise than, over other workers."""


@dataclass(frozen=True)
class OllamaLayout:
    """What the server is made of."""

    checks: Checks
    upload_folder: Path
    """Where uploads for this model are kept, unless the configuration says."""
    make_backend: Callable[[], OllamaBackend]


def at_url(config: Config) -> OllamaLayout:
    """Ask the Ollama server of ``config.backend`` for the model. Raises StartFailed."""
    assert config.model is not None, "the configuration was checked for it"
    model = str(config.model)
    settings = OllamaSettings(
        model=model,
        url=config.backend.urls[0] if config.backend.urls else DEFAULT_URL,
        alias=config.aliases[0] if config.aliases else "",
        ignore_unsupported=config.ignore_unsupported,
    )
    base = asyncio.run(look(settings))
    unsupported = Unsupported.LEAVE_OUT if config.ignore_unsupported else Unsupported.REFUSE
    names = {*config.aliases, model, full_name(model), model.removesuffix(f":{DEFAULT_TAG}")}
    return OllamaLayout(
        Checks(base, frozenset(names), unsupported, experts=False),
        named_upload_folder(full_name(model), config.http.address),
        lambda: OllamaBackend(settings),
    )
