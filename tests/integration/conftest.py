"""One product for all tests that only ask it things."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from proxies import character_arguments, running_proxy
from servers import Server


@pytest.fixture(scope="session")
def product(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Server]:
    """``loraproxy serve`` with SmolLM2 and the four characters, 4 slots of 1024 tokens."""
    with running_proxy(tmp_path_factory.mktemp("product"), character_arguments()) as server:
        yield server
