"""Adapters of a mixture of experts: checked like any other, and marked as what only llama.cpp's LoRA graph applies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from gguf_tools import make_gguf_adapter, make_peft_folder, peft_config, random_peft_tensors
from keyed_models import EXPERTS, N_EMBD, N_EXPERT, N_FF, make_moe, merged, peft_expert_shapes, random_pairs
from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.compose import compose
from loraproxy.adapters.gguf_write import write_gguf_adapter
from loraproxy.adapters.read import read_adapter, survey_adapter
from loraproxy.errors import InvalidAdapterFile

GATE = "blk.0.ffn_gate_exps.weight"


@pytest.fixture
def base(tmp_path: Path) -> BaseModel:
    return BaseModel.from_gguf(make_moe(tmp_path / "base.gguf"))


def pair(a: tuple[int, ...], b: tuple[int, ...], target: str = GATE) -> dict[str, NDArray[np.float32]]:
    return {f"{target}.lora_a": np.ones(a, np.float32), f"{target}.lora_b": np.ones(b, np.float32)}


def test_an_adapter_of_experts_is_read_whole_and_needs_the_graph(tmp_path: Path, base: BaseModel):
    path = make_gguf_adapter(tmp_path / "x.gguf", random_pairs(EXPERTS, rank=8), alpha=4.0)
    adapter = read_adapter("x", path, base)
    assert adapter.summary == survey_adapter("x", path, base)
    assert adapter.summary.needs_graph
    assert adapter.summary.rank == (8, 8)
    assert {tensor.target: (*tensor.b.shape[:2], tensor.a.shape[2]) for tensor in adapter.tensors} == EXPERTS
    assert all((tensor.n_expert, tensor.scale) == (N_EXPERT, 0.5) for tensor in adapter.tensors)


def test_an_adapter_of_a_mixtures_attention_alone_does_not_need_the_graph(tmp_path: Path, base: BaseModel):
    shapes = {"blk.0.attn_q.weight": (N_EMBD, N_EMBD), "blk.0.ffn_gate_inp.weight": (N_EXPERT, N_EMBD)}
    path = make_gguf_adapter(tmp_path / "x.gguf", random_pairs(shapes))
    assert not survey_adapter("x", path, base).needs_graph


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        ((3, 4, N_EMBD), (3, N_FF, 4), "wrong shape"),
        ((N_EXPERT, 4, N_EMBD), (3, N_FF, 4), "wrong shape"),
        ((N_EXPERT, 4, 63), (N_EXPERT, N_FF, 4), "wrong shape"),
        ((N_EXPERT, 4, N_EMBD), (N_EXPERT, N_FF, 5), "no low-rank pair"),
        ((4, N_EMBD), (N_FF, 4), r"A is \(experts, rank, n\)"),
        ((1, N_EXPERT, 4, N_EMBD), (1, N_EXPERT, N_FF, 4), "no low-rank pair"),
        ((N_EXPERT, 2048, N_EMBD), (N_EXPERT, N_FF, 2048), "rank 2048; 1 to 1024"),
    ],
)
def test_experts_pairs_of_other_shapes_are_refused(
    tmp_path: Path, base: BaseModel, a: tuple[int, ...], b: tuple[int, ...], reason: str
):
    path = make_gguf_adapter(tmp_path / "x.gguf", pair(a, b))
    for look in (survey_adapter, read_adapter):
        with pytest.raises(InvalidAdapterFile, match=reason):
            look("x", path, base)


def test_three_dimensions_for_a_plain_matrix_are_refused(tmp_path: Path, base: BaseModel):
    path = make_gguf_adapter(tmp_path / "x.gguf", pair((2, 4, N_EMBD), (2, N_EMBD, 4), "blk.0.attn_q.weight"))
    with pytest.raises(InvalidAdapterFile, match="no low-rank pair"):
        read_adapter("x", path, base)


def test_one_experts_nan_is_found(tmp_path: Path, base: BaseModel):
    tensors = random_pairs({GATE: EXPERTS[GATE]})
    tensors[f"{GATE}.lora_b"][3, 5, 1] = np.nan
    with pytest.raises(InvalidAdapterFile, match="NaN or infinite"):
        read_adapter("x", make_gguf_adapter(tmp_path / "x.gguf", tensors), base)


def test_an_adapter_of_experts_is_written_as_it_was_read(tmp_path: Path, base: BaseModel):
    path = make_gguf_adapter(tmp_path / "x.gguf", random_pairs(EXPERTS), alpha=None)
    write_gguf_adapter(read_adapter("x", path, base), base, tmp_path / "y.gguf", "f32")
    first, second = (read_adapter("x", file, base) for file in (path, tmp_path / "y.gguf"))
    for left, right in zip(first.tensors, second.tensors, strict=True):
        assert np.array_equal(left.a, right.a)
        assert np.array_equal(left.b, right.b)


def test_composed_adapters_of_experts_add_up(tmp_path: Path, base: BaseModel):
    pairs = [random_pairs({GATE: EXPERTS[GATE]}, rank=rank, seed=rank) for rank in (3, 5)]
    adapters = [
        read_adapter(f"x{i}", make_gguf_adapter(tmp_path / f"x{i}.gguf", tensors, alpha=None), base)
        for i, tensors in enumerate(pairs)
    ]
    (tensor,) = compose([(adapters[0], 0.5), (adapters[1], -2.0)], base).tensors
    expected = merged(pairs[0], 0.5)[GATE] + merged(pairs[1], -2.0)[GATE]
    assert tensor.rank == 8
    assert np.allclose(tensor.b @ tensor.a, expected, atol=1e-5)


def test_a_peft_folders_experts_are_stacked_whatever_their_ranks_and_alphas(tmp_path: Path, base: BaseModel):
    shapes = peft_expert_shapes()
    ranks = {module: 1 + i % 5 for i, module in enumerate(shapes)}
    tensors = random_peft_tensors(shapes, ranks=ranks)
    folder = make_peft_folder(tmp_path / "x", tensors, peft_config(lora_alpha=2, alpha_pattern={"w2": 3}))
    adapter = read_adapter("x", folder, base)
    assert adapter.summary == survey_adapter("x", folder, base)
    found = {tensor.target: np.float32(tensor.scale) * (tensor.b @ tensor.a) for tensor in adapter.tensors}
    assert found.keys() == EXPERTS.keys()
    for module, rank in ranks.items():
        _, _, layer, _, _, number, leaf = module.split(".")
        kind = {"w1": "gate", "w2": "down", "w3": "up"}[leaf]
        a, b = (tensors[f"base_model.model.{module}.lora_{half}.weight"] for half in "AB")
        expected = np.float32((3 if leaf == "w2" else 2) / rank) * (b @ a)
        assert np.allclose(found[f"blk.{layer}.ffn_{kind}_exps.weight"][int(number)], expected, atol=1e-5)


def test_experts_that_a_peft_folder_does_not_adapt_are_left_as_they_are(tmp_path: Path, base: BaseModel):
    module = "model.layers.1.block_sparse_moe.experts.2.w1"
    folder = make_peft_folder(tmp_path / "x", random_peft_tensors({module: (N_FF, N_EMBD)}))
    (tensor,) = read_adapter("x", folder, base).tensors
    assert tensor.target == "blk.1.ffn_gate_exps.weight"
    assert [bool(tensor.b[i].any()) for i in range(N_EXPERT)] == [False, False, True, False]


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (random_peft_tensors({"model.layers.0.block_sparse_moe.experts.4.w1": (N_FF, N_EMBD)}), "has 4 experts"),
        (random_peft_tensors({"model.layers.0.block_sparse_moe.experts.0.w1": (N_FF, 63)}), "wrong shape"),
        (random_peft_tensors({"model.layers.0.block_sparse_moe.experts.0.w9": (N_FF, N_EMBD)}), "does not have"),
        (
            random_peft_tensors(
                dict.fromkeys(
                    ("model.layers.0.block_sparse_moe.experts.0.w1", "model.layers.0.block_sparse_moe.experts.00.w1"),
                    (N_FF, N_EMBD),
                )
            ),
            "are both tensor",
        ),
    ],
)
def test_a_peft_folders_experts_that_do_not_fit_are_refused(
    tmp_path: Path, base: BaseModel, tensors: dict[str, NDArray[np.float32]], reason: str
):
    folder = make_peft_folder(tmp_path / "x", tensors)
    for look in (survey_adapter, read_adapter):
        with pytest.raises(InvalidAdapterFile, match=reason):
            look("x", folder, base)
