"""Start-up: register the adapters and check each file against the base model.

A file that cannot be applied ends the start with one line, before anything listens.
"""

from __future__ import annotations

import logging
from pathlib import Path

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.read import read_adapter, scan_adapters_dir
from loraproxy.adapters.registry import AdapterRegistry
from loraproxy.config import Config
from loraproxy.errors import ApiError, StartFailed

log = logging.getLogger(__name__)


def load_registry(config: Config, model: Path) -> AdapterRegistry:
    """The configured adapters, in the order of their ids, each read and checked. Raises StartFailed."""
    registry = AdapterRegistry()
    try:
        for name, adapter in config.adapters.items():
            registry.add(name, adapter.path.absolute(), default_scale=adapter.scale)
        if config.adapters_dir is not None:
            for name, path in scan_adapters_dir(config.adapters_dir):
                if name not in registry:  # one that is configured by name keeps its own path and scale
                    registry.add(name, path.absolute())
        base = BaseModel.from_gguf(model)
        for registered in registry:
            read = read_adapter(registered.name, registered.path, base)
            registry.set_digest(registered.name, read.digest)
            log.info("adapter %d %s: %s", registered.id, registered.name, registered.path)
            for note in read.notes:
                log.info("adapter %s: %s", registered.name, note)
    except ApiError as error:
        raise StartFailed(error.message) from error
    return registry
