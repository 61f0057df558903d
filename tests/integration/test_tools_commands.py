"""The commands on files, as processes, on the real model; and a merged model against llama.cpp's own LoRA graph."""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from numpy.typing import NDArray

from gguf_tools import make_peft_folder, make_tiny_llama, random_peft_tensors
from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.gguf_header import read_gguf_header
from loraproxy.adapters.gguf_write import write_gguf_adapter
from loraproxy.adapters.read import read_adapter
from loraproxy.tools.files import ScaledAdapter
from loraproxy.tools.merge import merge
from proxies import children, is_alive, run_to_the_end
from servers import POLL_SECONDS, REPOSITORY, demo_adapters

EXPECTED = json.loads((REPOSITORY / "tests" / "expected.json").read_text())


def logits(
    model_path: Path, prompts: list[list[int]], adapters: list[tuple[Path, float]] = ()
) -> list[NDArray[np.float32]]:
    """llama.cpp's logits after each prompt, with adapter files applied by its own LoRA graph."""
    params = llama_cpp.llama_model_default_params()
    params.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(str(model_path).encode(), params)
    assert model
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = 256
    settings.n_threads = settings.n_threads_batch = 2
    context = llama_cpp.llama_init_from_model(model, settings)
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    try:
        loras = [llama_cpp.llama_adapter_lora_init(model, str(path).encode()) for path, _ in adapters]
        handles = (llama_cpp.llama_adapter_lora_p_ctypes * len(loras))(*loras)
        scales = (ctypes.c_float * len(loras))(*(scale for _, scale in adapters))
        assert llama_cpp.llama_set_adapters_lora(context, handles, len(loras), scales) == 0
        answers = []
        for prompt in prompts:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
            tokens = (llama_cpp.llama_token * len(prompt))(*prompt)
            assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(prompt))) == 0
            answers.append(np.array(llama_cpp.llama_get_logits_ith(context, -1)[:n_vocab], np.float32))
        return answers
    finally:
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)


def kl(p_logits: NDArray[np.float32], q_logits: NDArray[np.float32]) -> float:
    p, q = (x.astype(np.float64) - x.max() for x in (p_logits, q_logits))
    p, q = (x - np.log(np.exp(x).sum()) for x in (p, q))
    return float((np.exp(p) * (p - q)).sum())


def raw(path: Path) -> dict[str, bytes]:
    data = path.read_bytes()
    return {name: data[t.offset : t.offset + t.n_bytes] for name, t in read_gguf_header(data).tensors.items()}


def test_a_merged_model_computes_what_llama_cpps_own_lora_graph_does(f32_base: Path, tmp_path: Path) -> None:
    members = [("pirate", 0.7), ("wizard", 0.5)]
    base = BaseModel.from_gguf(f32_base)
    files = []
    for name, scale in members:
        files.append((tmp_path / f"{name}.gguf", scale))
        write_gguf_adapter(read_adapter(name, demo_adapters()[name], base), base, files[-1][0], "f32")
    merged = tmp_path / "merged.gguf"
    result = merge(f32_base, [ScaledAdapter(demo_adapters()[name], scale) for name, scale in members], merged)
    prompts = [case["prompt_tokens"] for case in EXPECTED["base"][:3]]
    graph = logits(f32_base, prompts, files)
    for theirs, ours, plain in zip(graph, logits(merged, prompts), logits(f32_base, prompts), strict=True):
        assert kl(theirs, ours) < 1e-4
        assert kl(theirs, plain) > 1e-2, "the adapters make a difference at all"
    assert result.rounding.kept == pytest.approx(1, abs=1e-3)
    merged.unlink()


def test_memory_is_bounded_by_the_adapter_and_not_by_the_model(f32_base: Path, tmp_path: Path) -> None:
    merged = tmp_path / "merged.gguf"
    tracemalloc.start()
    try:
        merge(f32_base, [ScaledAdapter(demo_adapters()["pirate"], 1.0)], merged)
        assert tracemalloc.get_traced_memory()[1] < f32_base.stat().st_size / 3
    finally:
        tracemalloc.stop()
    merged.unlink()


def test_llama_cpp_loads_a_model_whose_head_was_untied(tmp_path: Path) -> None:
    base = make_tiny_llama(tmp_path / "base.gguf")
    tensors = random_peft_tensors({"lm_head": (320, 64)}, ranks=4)
    make_peft_folder(tmp_path / "head", tensors)
    merge(base, [ScaledAdapter(tmp_path / "head", 1.0)], tmp_path / "merged.gguf")
    prompts = [[1, token, token + 1] for token in range(20, 36)]
    before, after = (np.stack(logits(path, prompts)) for path in (base, tmp_path / "merged.gguf"))
    sizes = np.linalg.svd(after - before, compute_uv=False)
    assert sizes[3] > 100 * sizes[4], "the logits differ by four directions, the rank of the adapter of the head"


@pytest.mark.parametrize("name", ["pirate", "wizard"])  # all projections of attention; all of the MLP
def test_merging_into_four_bits_keeps_the_adapter_and_the_bytes_of_all_else(
    model: Path, tmp_path: Path, name: str
) -> None:
    merged = tmp_path / "merged.gguf"
    result = merge(model, [ScaledAdapter(demo_adapters()[name], 1.0)], merged)
    assert result.rounding.kept > 0.9
    assert merged.stat().st_size - model.stat().st_size < 4096
    touched = {pair.target for pair in read_adapter(name, demo_adapters()[name], BaseModel.from_gguf(model)).tensors}
    before, after = raw(model), raw(merged)
    assert {tensor for tensor in before if before[tensor] != after[tensor]} == touched
    assert before.keys() == after.keys()


def test_inspect_names_the_wizards_rslora_its_scale_and_that_it_fits(model: Path) -> None:
    done = run_to_the_end("inspect", str(demo_adapters()["wizard"]), "--model", str(model))
    assert done.returncode == 0, done.stderr
    assert "2.83 = 8 / sqrt(8) (rsLoRA)" in done.stdout
    assert "ffn_down, ffn_gate, ffn_up in layers 0-29" in done.stdout
    assert "fits      llama model" in done.stdout


def test_another_file_type_is_written_by_llama_cpps_quantiser(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    adapter = f"{demo_adapters()['pirate']}:0.5"
    done = run_to_the_end(
        "merge", "-m", str(model), "--adapter", adapter, "-o", str(out), "--type", "q8_0", timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no progress where there is no terminal"
    header = read_gguf_header(out.read_bytes())
    assert header.metadata["general.file_type"] == 7
    assert {tensor.type.name for tensor in header.tensors.values()} == {"Q8_0", "F32"}
    assert str(header.metadata["general.name"]).endswith("+ pirate:0.5")
    assert "tokenizer.chat_template" in header.metadata
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


def test_what_llama_cpps_quantiser_refuses_is_said_in_its_words(model: Path, tmp_path: Path) -> None:
    adapter, out = demo_adapters()["pirate"], tmp_path / "out.gguf"
    arguments = ["merge", "-m", str(model), "--adapter", str(adapter), "-o", str(out), "--type", "IQ2_XXS"]
    done = run_to_the_end(*arguments, timeout=200)
    assert done.returncode == 1
    assert "cannot write IQ2_XXS" in done.stderr
    assert "imatrix" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def _sigint_is_heard() -> Iterator[None]:
    """A shell's background jobs ignore SIGINT, and so do their children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_sigint_is_heard")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_merge_leaves_nothing_behind(
    model: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    arguments = [
        "merge",
        "-m",
        str(model),
        "--adapter",
        str(demo_adapters()["robot"]),
        "-o",
        str(tmp_path / "out.gguf"),
    ]
    command = [sys.executable, "-m", "loraproxy", *arguments, "--type", "Q6_K"]
    with subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, start_new_session=True) as process:
        while not list(tmp_path.glob(".out.gguf.*.new")):  # llama.cpp's quantiser has begun to write
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
        process.send_signal(number)
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == code
    assert list(tmp_path.iterdir()) == []


def test_a_benchmark_that_is_told_to_end_leaves_no_server_behind(tmp_path, model):
    command = [sys.executable, "-m", "loraproxy", "bench", "--no-llama-server", "--only", "one-base"]
    with subprocess.Popen([*command, "--out", str(tmp_path)], cwd=REPOSITORY, stderr=subprocess.DEVNULL) as bench:
        while not (started := children(bench)):
            assert bench.poll() is None
            time.sleep(POLL_SECONDS)
        bench.terminate()
        assert bench.wait(60) == 128 + signal.SIGTERM
    assert not [pid for pid in started if is_alive(pid)]
