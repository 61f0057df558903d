"""One adapter set through llama.cpp's own LoRA graph: experts and recurrent models, held against merged weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from gguf_tools import (
    make_gguf_adapter,
    make_peft_folder,
    make_tiny_llama,
    peft_config,
    random_peft_tensors,
    tiny_llama_shapes,
)
from keyed_models import (
    EXPERT_MODULES,
    EXPERTS,
    N_EMBD,
    N_EXPERT,
    N_LAYER,
    make_mamba,
    make_moe,
    mamba_shapes,
    merged,
    moe_shapes,
    peft_expert_shapes,
    random_pairs,
)
from llama_cpp_logits import PROMPT, divergence, logits
from loraproxy import _native
from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.gguf_write import write_gguf_adapter
from loraproxy.adapters.read import read_adapter
from loraproxy.adapters.sets import BASE, AdapterSet
from loraproxy.config import WorkerSetMember, WorkerSettings
from loraproxy.errors import AdapterChanged, InvalidAdapterFile, InvalidRequest
from loraproxy.worker.model import Model
from loraproxy.worker.runtime import Runtime

MAX_DIVERGENCE = 1e-4


@contextmanager
def graph_runtime(model: Path) -> Iterator[Runtime]:
    settings = WorkerSettings(
        model=model, socket=model.parent / "w.sock", parallel=2, ctx_size=128, threads=1, lora_mode="graph"
    )
    runtime = Runtime(Model(model), settings)
    try:
        yield runtime
    finally:
        runtime.close()


def change(runtime: Runtime, *members: WorkerSetMember) -> None:
    assert runtime.graph is not None
    staged = runtime.graph.stage(members)
    try:
        runtime.graph.activate(staged)
    finally:
        for adapter in staged:
            adapter.discard()


def last_logits(runtime: Runtime) -> NDArray[np.float32]:
    runtime.clear(0)
    runtime.prefill(0, PROMPT, 0, [], True)
    return _native.logits(runtime.address, -1)


def member(path: Path, number: int = 0, scale: float = 1.0, digest: str = "") -> WorkerSetMember:
    return WorkerSetMember(id=number, name=path.stem, path=path, scale=scale, digest=digest)


Maker = Callable[[Path, Mapping[str, NDArray[np.float32]] | None], Path]
EVERY_PRODUCT = {name: shape for name, shape in moe_shapes().items() if name != "token_embd.weight"}
CASES = {
    "experts alone": (make_moe, "llama", EXPERTS),
    "experts, router, attention and head": (make_moe, "llama", EVERY_PRODUCT),
    "a recurrent model": (
        make_mamba,
        "mamba",
        {name: shape for name, shape in mamba_shapes().items() if name != "token_embd.weight"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_merged_weights_and_of_llama_cpp_alone(tmp_path: Path, case: str):
    make, architecture, shapes = CASES[case]
    base = make(tmp_path / "base.gguf", None)
    pairs = random_pairs(shapes, std=0.2)
    adapter = make_gguf_adapter(tmp_path / "x.gguf", pairs, architecture=architecture, alpha=6.0)
    whole = make(tmp_path / "merged.gguf", merged(pairs, 0.5 * 6.0 / 4))
    with graph_runtime(base) as runtime:
        plain = last_logits(runtime)
        change(runtime, member(adapter, scale=0.5))
        adapted = last_logits(runtime)
        change(runtime)
        again = last_logits(runtime)
    assert divergence(adapted, logits(whole)[-1]) < MAX_DIVERGENCE
    assert divergence(adapted, logits(base, adapter, 0.5)[-1]) < MAX_DIVERGENCE
    assert divergence(plain, logits(base)[-1]) < MAX_DIVERGENCE
    assert np.array_equal(plain, again)
    assert divergence(adapted, plain) > 0.01


def test_a_set_of_several_adapters_is_their_sum_and_adapters_come_and_go(tmp_path: Path):
    base = make_moe(tmp_path / "base.gguf")
    pairs = [random_pairs(EXPERTS, std=0.2, seed=seed) for seed in range(3)]
    files = [
        make_gguf_adapter(tmp_path / f"x{i}.gguf", tensors, architecture="llama", alpha=None)
        for i, tensors in enumerate(pairs)
    ]
    sets = [{0: 0.5, 1: 0.25}, {1: 0.25, 2: -0.5}, {1: 1.0}, {2: 1.0}, {0: 1.0, 1: 0.5, 2: 0.25}, {}]
    with graph_runtime(base) as runtime:
        for number, scales in enumerate(sets):
            change(runtime, *(member(files[i], i, scale) for i, scale in scales.items()))
            assert runtime.graph is not None
            assert runtime.graph.active == AdapterSet.of(scales)
            deltas: dict[str, NDArray[np.float32]] = {}
            for i, scale in scales.items():
                for name, delta in merged(pairs[i], scale).items():
                    deltas[name] = deltas.get(name, np.float32(0)) + delta
            whole = make_moe(tmp_path / f"merged{number}.gguf", deltas)
            assert divergence(last_logits(runtime), logits(whole)[-1]) < MAX_DIVERGENCE
    assert not list(tmp_path.glob("adapter-*"))


def test_a_peft_folder_is_applied_as_its_conversion_is(tmp_path: Path):
    path = make_tiny_llama(tmp_path / "base.gguf", tied=False)
    shapes = {**tiny_llama_shapes(), "lm_head": (320, 64)}
    config = peft_config(use_rslora=True, lora_alpha=2)
    folder = make_peft_folder(tmp_path / "peft", random_peft_tensors(shapes), config)
    base = BaseModel.from_gguf(path)
    write_gguf_adapter(read_adapter("peft", folder, base), base, tmp_path / "x.gguf", "f32")
    with graph_runtime(path) as runtime:
        change(runtime, member(folder))
        adapted = last_logits(runtime)
    assert divergence(adapted, logits(path, tmp_path / "x.gguf")[-1]) < MAX_DIVERGENCE


@pytest.mark.parametrize("architecture", EXPERT_MODULES)
def test_a_peft_folder_of_a_mixture_equals_merged_weights(tmp_path: Path, architecture: str):
    path = make_moe(tmp_path / "base.gguf", architecture=architecture)
    block, kinds = EXPERT_MODULES[architecture]
    shapes = peft_expert_shapes(architecture)
    parts = "vo" if architecture == "llama" else "qkvo"  # llama's q and k have another order of rows in GGUF
    shapes |= {f"model.layers.{i}.self_attn.{part}_proj": (N_EMBD, N_EMBD) for i in range(N_LAYER) for part in parts}
    shapes |= {f"model.layers.{i}.{block}.gate": (N_EXPERT, N_EMBD) for i in range(N_LAYER)}
    tensors = random_peft_tensors(shapes)
    deltas = {name: np.zeros(shape, np.float32) for name, shape in moe_shapes().items()}
    for module in shapes:
        a, b = (tensors[f"base_model.model.{module}.lora_{half}.weight"] for half in "AB")
        added = np.float32(4 / 4) * (b @ a)
        _, _, layer, *rest = module.split(".")
        if rest[1:2] == ["experts"]:
            deltas[f"blk.{layer}.ffn_{kinds[rest[3]]}_exps.weight"][int(rest[2])] += added
        elif rest[-1] == "gate":
            deltas[f"blk.{layer}.ffn_gate_inp.weight"] += added
        else:
            name = rest[-1].removesuffix("_proj")
            deltas[f"blk.{layer}.attn_{'output' if name == 'o' else name}.weight"] += added
    folder = make_peft_folder(tmp_path / "x", tensors, peft_config(lora_alpha=4))
    with graph_runtime(path) as runtime:
        plain = last_logits(runtime)
        change(runtime, member(folder))
        adapted = last_logits(runtime)
    whole = make_moe(tmp_path / "merged.gguf", deltas, architecture=architecture)
    assert divergence(adapted, logits(whole)[-1]) < MAX_DIVERGENCE
    assert divergence(adapted, plain) > 0.01


def test_an_adapter_that_cannot_be_applied_is_refused_and_the_set_stays(tmp_path: Path):
    base = make_mamba(tmp_path / "base.gguf")
    good = make_gguf_adapter(
        tmp_path / "good.gguf", random_pairs({"output.weight": (320, 64)}), architecture="mamba", alpha=None
    )
    no_product = make_gguf_adapter(
        tmp_path / "conv.gguf", random_pairs({"blk.0.ssm_conv1d.weight": (128, 4)}), architecture="mamba", alpha=None
    )
    with graph_runtime(base) as runtime:
        change(runtime, member(good))
        adapted = last_logits(runtime)
        with pytest.raises(InvalidAdapterFile, match=r"no mul_mat with 'blk\.0\.ssm_conv1d\.weight'"):
            change(runtime, member(good), member(no_product, 1))
        with pytest.raises(AdapterChanged, match="the file of adapter 'good' changed"):
            change(runtime, member(good, 1, digest="0" * 64))
        with pytest.raises(InvalidRequest, match="named twice"):
            change(runtime, member(good), member(good))
        assert runtime.graph is not None
        assert runtime.graph.active == AdapterSet.of({0: 1.0})
        assert np.array_equal(last_logits(runtime), adapted)


def test_a_tied_embedding_is_refused_since_llama_cpp_would_abort(tmp_path: Path):
    base = make_tiny_llama(tmp_path / "base.gguf", tied=True)
    pairs = {
        "token_embd.weight.lora_a": np.ones((320, 4), np.float32),
        "token_embd.weight.lora_b": np.ones((64, 4), np.float32),
    }
    adapter = make_gguf_adapter(tmp_path / "x.gguf", pairs)
    with graph_runtime(base) as runtime:
        with pytest.raises(InvalidAdapterFile, match="shares one tensor between embedding and output head"):
            change(runtime, member(adapter))
        assert runtime.graph is not None
        assert runtime.graph.active == BASE
