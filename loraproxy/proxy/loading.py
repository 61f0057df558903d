"""Start-up: register the adapters and check each file against the base model."""

from __future__ import annotations

import logging
from pathlib import Path

from loraproxy.adapters.registry import AdapterRegistry
from loraproxy.config import Config
from loraproxy.errors import ApiError, StartFailed

log = logging.getLogger(__name__)
