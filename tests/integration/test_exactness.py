"""The delta path against llama.cpp's own LoRA graph, and against PEFT's reference computation."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from numpy.typing import NDArray

from loraproxy import _native
from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.gguf_write import write_gguf_adapter
from loraproxy.adapters.read import read_adapter
from loraproxy.config import WorkerSettings
from loraproxy.worker.model import Model
from loraproxy.worker.runtime import Runtime
from servers import REPOSITORY, demo_adapters

EXPECTED: dict[str, list[dict[str, Any]]] = json.loads((REPOSITORY / "tests" / "expected.json").read_text())
CHARACTERS = ("pirate", "robot", "bard", "wizard")


@pytest.fixture(scope="module")
def runtime(f32_base: Path) -> Iterator[Runtime]:
    """The delta path over the F32 base with the four characters, ids in CHARACTERS' order."""
    settings = WorkerSettings(
        model=f32_base, socket=Path("unused"), parallel=4, ctx_size=2048, threads=2, prompt_chunk=64
    )
    runtime = Runtime(Model(f32_base), settings)
    base = BaseModel.from_gguf(f32_base)
    for number, name in enumerate(CHARACTERS):
        adapter = read_adapter(name, demo_adapters()[name], base)
        runtime.delta.insert(number, runtime.delta.prepare(adapter))
    yield runtime
    runtime.close()


def _delta_logits(runtime: Runtime, prompt: list[int], adapters: list[tuple[int, float]]) -> NDArray[np.float32]:
    runtime.clear(0)
    runtime.prefill(0, prompt, 0, adapters, True)
    return _native.logits(runtime.address, -1)


def _graph_logits(
    runtime: Runtime, folder: Path, base: Path, prompts: list[list[int]], scales: dict[str, float]
) -> list[NDArray[np.float32]]:
    """The same with llama.cpp's own LoRA graph, in a context of its own on the same model."""
    known, handle = BaseModel.from_gguf(base), runtime.model.handle
    loras = []
    for name in scales:
        file = folder / f"{name}.gguf"
        write_gguf_adapter(read_adapter(name, demo_adapters()[name], known), known, file, "f32")
        loras.append(llama_cpp.llama_adapter_lora_init(handle, str(file).encode()))
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 256
    params.n_threads = params.n_threads_batch = 2
    context = llama_cpp.llama_init_from_model(handle, params)
    address = ctypes.cast(context, ctypes.c_void_p).value or 0
    try:
        array = (llama_cpp.llama_adapter_lora_p_ctypes * len(loras))(*loras)
        values = (ctypes.c_float * len(loras))(*scales.values())
        assert llama_cpp.llama_set_adapters_lora(context, array, len(loras), values) == 0
        answers = []
        for prompt in prompts:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
            assert _native.decode_chunk(address, None, prompt, 0, 0, True, []) == (0, "")
            answers.append(_native.logits(address, -1))
        return answers
    finally:
        llama_cpp.llama_free(context)
        for lora in loras:
            llama_cpp.llama_adapter_lora_free(lora)


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def _kl(p_logits: NDArray[np.float32], q_logits: NDArray[np.float32]) -> float:
    p, q = _log_softmax(p_logits), _log_softmax(q_logits)
    return float((np.exp(p) * (p - q)).sum())


@pytest.mark.parametrize("name", CHARACTERS)
def test_the_delta_path_agrees_with_llama_cpps_own_lora_graph(
    runtime: Runtime, f32_base: Path, tmp_path: Path, name: str
) -> None:
    prompts = [case["prompt_tokens"] for case in EXPECTED[name]]
    graph = _graph_logits(runtime, tmp_path, f32_base, prompts, {name: 1.0})
    for prompt, theirs in zip(prompts, graph, strict=True):
        ours = _delta_logits(runtime, prompt, [(CHARACTERS.index(name), 1.0)])
        assert _kl(theirs, ours) < 1e-4
        assert _kl(theirs, _delta_logits(runtime, prompt, [])) > 1e-2, "the adapter makes a difference at all"


def test_two_adapters_at_their_scales_agree_with_the_graph(runtime: Runtime, f32_base: Path, tmp_path: Path) -> None:
    prompts = [case["prompt_tokens"] for case in EXPECTED["base"][:2]]
    graph = _graph_logits(runtime, tmp_path, f32_base, prompts, {"pirate": 0.7, "wizard": 0.5})
    for prompt, theirs in zip(prompts, graph, strict=True):
        ours = _delta_logits(runtime, prompt, [(0, 0.7), (3, 0.5)])
        assert _kl(theirs, ours) < 1e-4


@pytest.mark.parametrize("name", ["base", *CHARACTERS])
def test_the_most_likely_token_is_the_one_peft_computed(runtime: Runtime, name: str) -> None:
    adapters = [(CHARACTERS.index(name), 1.0)] if name in CHARACTERS else []
    for case in EXPECTED[name]:
        ours = _log_softmax(_delta_logits(runtime, case["prompt_tokens"], adapters))
        assert int(ours.argmax()) == case["top5"][0][0]
        for token, logprob in case["top5"]:
            assert ours[token] == pytest.approx(logprob, abs=0.03)


def test_a_step_of_all_characters_gives_each_row_its_own_logits(runtime: Runtime) -> None:
    prompts = [EXPECTED[name][0]["prompt_tokens"] for name in CHARACTERS]
    sets = [[(number, 1.0)] for number in range(4)]
    alone = []
    for prompt, adapters in zip(prompts, sets, strict=True):
        _delta_logits(runtime, prompt[:-1], adapters)
        runtime.step([prompt[-1]], [len(prompt) - 1], 0, [adapters])
        alone.append(_native.logits(runtime.address, 0))
    for slot, (prompt, adapters) in enumerate(zip(prompts, sets, strict=True)):
        runtime.clear(slot)
        runtime.prefill(slot, prompt[:-1], 0, adapters, False)
    runtime.step([p[-1] for p in prompts], [len(p) - 1 for p in prompts], 0, sets)
    for row in range(4):
        assert _kl(alone[row], _native.logits(runtime.address, row)) < 1e-6
