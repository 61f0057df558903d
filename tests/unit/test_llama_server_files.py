"""The files that a llama-server is started with: those that were registered, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
from ollama_bench import tiny_adapter, tiny_base

from loraproxy.adapters.read import read_adapter
from loraproxy.backends.llama_server_spawned import file_for
from loraproxy.config import WorkerAdapter
from loraproxy.errors import AdapterChanged


@pytest.mark.parametrize("ignore_unsupported", [False, True])
def test_a_file_that_is_not_the_one_that_was_registered_is_not_loaded(tmp_path: Path, ignore_unsupported: bool) -> None:
    base, path = tiny_base(tmp_path), tiny_adapter(tmp_path, "a", seed=1)
    digest = read_adapter("a", path, base).digest
    item = WorkerAdapter(id=0, name="a", path=path, digest=digest, ignore_unsupported=ignore_unsupported)
    made = file_for(item, base, tmp_path)
    assert (made == path) is not ignore_unsupported
    made.unlink()
    tiny_adapter(tmp_path, "a", seed=2)
    with pytest.raises(AdapterChanged, match=r"'a'.*has changed since it was registered"):
        file_for(item, base, tmp_path)
