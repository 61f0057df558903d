"""What the tests of the commands on files share: adapters for the tiny base, and running a command in this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gguf_tools import make_peft_folder, peft_config, random_peft_tensors, tiny_llama_shapes
from loraproxy.cli import main

SHAPES = tiny_llama_shapes()
ATTENTION = {name: SHAPES[name] for name in SHAPES if name.endswith(("q_proj", "v_proj"))}


def peft(
    folder: Path, shapes: Mapping[str, tuple[int, int]] = ATTENTION, *, seed: int = 0, std: float = 0.2, **config: Any
) -> Path:
    """A PEFT folder with random pairs for ``shapes``; ``config`` replaces entries of its configuration."""
    return make_peft_folder(folder, random_peft_tensors(shapes, seed=seed, std=std), peft_config(**config))


def run(command: str, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """``loraproxy COMMAND ARGUMENTS``: the exit code, and what it printed on stdout and on stderr."""
    code = main([command, *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err
