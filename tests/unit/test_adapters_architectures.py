"""Where modules lie in base models: whole, interleaved, and fused on either side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gguf_tools import make_peft_folder, peft_config, random_peft_tensors
from keyed_models import EXPERT_MODULES
from loraproxy.adapters.architectures import ARCHITECTURES, ModuleNames
from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.pairs import Place, Rows
from loraproxy.adapters.read import read_adapter
from loraproxy.adapters.tensors import LoraTensor
from loraproxy.errors import InvalidAdapterFile
from tiny_models import BY_NAME, KINDS, Kind, gguf_weights, module_shapes, random_weights, write_model

ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.1.mlp"
Q, KV, FF = 64, 32, 96


def base_of(path: Path, kind: Kind, *, fuse_qkv: bool = False) -> BaseModel:
    return BaseModel.from_gguf(write_model(path, kind, gguf_weights(kind, random_weights(kind), fuse_qkv=fuse_qkv)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> BaseModel:
    return base_of(tmp_path_factory.mktemp("llama") / "x.gguf", BY_NAME["llama"])


@pytest.fixture(scope="module")
def phi3(tmp_path_factory) -> BaseModel:
    return base_of(tmp_path_factory.mktemp("phi3") / "x.gguf", BY_NAME["phi3"])


def whole(target: str, n_rows: int, heads: int = 0, source: int = 0) -> Place:
    return Place(f"blk.1.{target}.weight", (Rows(source, 0, n_rows, heads),))


def test_every_architecture_is_proved_on_a_tiny_model():
    assert {kind.architecture for kind in KINDS} | set(EXPERT_MODULES) == set(ARCHITECTURES)
    assert all(ARCHITECTURES[kind.architecture].interleaved is kind.interleaved for kind in KINDS)


def test_whole_modules_are_interleaved_where_the_architecture_asks_for_it(llama, tmp_path):
    names = ModuleNames(llama)
    assert names.places(f"{ATTENTION}.q_proj") == (whole("attn_q", Q, heads=4),)
    assert names.places(f"{ATTENTION}.k_proj") == (whole("attn_k", KV, heads=2),)
    assert names.places(f"{ATTENTION}.v_proj") == (whole("attn_v", KV),)
    assert names.places(f"{MLP}.up_proj") == (whole("ffn_up", FF),)
    assert names.places("lm_head") == (Place("output.weight", (Rows(0, 0, 320),)),)
    assert names.places("model.embed_tokens") == (Place("token_embd.weight", (Rows(0, 0, 64),)),)
    qwen2 = ModuleNames(base_of(tmp_path / "x.gguf", BY_NAME["qwen2"]))
    assert qwen2.places(f"{ATTENTION}.q_proj") == (whole("attn_q", Q),)


@pytest.mark.parametrize("module", ["", ".", "x", "model.layers.9.mlp.up_proj", "model.norm", f"{ATTENTION}.q_norm"])
def test_other_modules_have_no_place(llama, phi3, module):
    assert ModuleNames(llama).places(module) == ModuleNames(phi3).places(module) == ()
    for leaf in ("qkv_proj", "gate_up_proj", "q_proj", "gate_proj", "up_proj"):
        assert ModuleNames(llama).places(f"{module}.{leaf}") == ModuleNames(phi3).places(f"{module}.{leaf}") == ()


def test_a_fused_module_is_cut_where_the_base_is_split(llama):
    names = ModuleNames(llama)
    assert names.places(f"{ATTENTION}.qkv_proj") == (
        whole("attn_q", Q, heads=4),
        whole("attn_k", KV, heads=2, source=Q),
        whole("attn_v", KV, source=Q + KV),
    )
    assert names.places(f"{MLP}.gate_up_proj") == (whole("ffn_gate", FF), whole("ffn_up", FF, source=FF))


def test_a_split_module_is_rows_of_a_fused_tensor(phi3):
    names = ModuleNames(phi3)
    for leaf, at, n_rows in (("q_proj", 0, Q), ("k_proj", Q, KV), ("v_proj", Q + KV, KV)):
        assert names.places(f"{ATTENTION}.{leaf}") == (Place("blk.1.attn_qkv.weight", (Rows(0, at, n_rows),)),)
    for leaf, at in (("gate_proj", 0), ("up_proj", FF)):
        assert names.places(f"{MLP}.{leaf}") == (Place("blk.1.ffn_up.weight", (Rows(0, at, FF),)),)


def test_a_tensor_that_was_fused_after_interleaving_is_interleaved_part_by_part(tmp_path):
    names = ModuleNames(base_of(tmp_path / "x.gguf", BY_NAME["llama"], fuse_qkv=True))
    rows = (Rows(0, 0, Q, 4), Rows(Q, Q, KV, 2), Rows(Q + KV, Q + KV, KV))
    assert names.places(f"{ATTENTION}.qkv_proj") == (Place("blk.1.attn_qkv.weight", rows),)
    assert names.places(f"{ATTENTION}.k_proj") == (Place("blk.1.attn_qkv.weight", (Rows(0, Q, KV, 2),)),)


def read(folder: Path, base: BaseModel, shapes: dict[str, tuple[int, int]], **config: object) -> tuple[LoraTensor, ...]:
    tensors = random_peft_tensors(shapes, ranks={module: 2 + i for i, module in enumerate(shapes)})
    return read_adapter("x", make_peft_folder(folder, tensors, peft_config(**config)), base).tensors


def test_split_modules_of_one_scale_keep_it_and_others_have_it_in_b(phi3, tmp_path):
    shapes = {f"{ATTENTION}.q_proj": (Q, 64), f"{ATTENTION}.v_proj": (KV, 64)}
    tensors = random_peft_tensors(shapes, ranks=2)
    config = peft_config(lora_alpha=6, alpha_pattern={"v_proj": 1})
    (one,) = read_adapter("x", make_peft_folder(tmp_path / "1", tensors, peft_config(lora_alpha=6)), phi3).tensors
    (two,) = read_adapter("x", make_peft_folder(tmp_path / "2", tensors, config), phi3).tensors
    assert (one.target, one.rank, one.scale) == ("blk.1.attn_qkv.weight", 4, 3.0)
    assert (two.rank, two.scale) == (4, 1.0)
    np.testing.assert_allclose(one.b[:Q] * 3, two.b[:Q])
    np.testing.assert_allclose(one.b[Q + KV :] * 0.5, two.b[Q + KV :])
    assert not one.b[Q : Q + KV].any()  # nothing for k, which the adapter does not have
    assert not one.b[:Q, 2:].any()
    assert not one.b[Q:, :2].any()


def test_a_fused_module_shares_its_a_between_its_tensors(llama, tmp_path):
    tensors = read(tmp_path, llama, {f"{ATTENTION}.qkv_proj": (Q + 2 * KV, 64)})
    assert [tensor.target for tensor in tensors] == [f"blk.1.attn_{part}.weight" for part in "kqv"]
    assert all(tensor.a is tensors[0].a for tensor in tensors)


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({f"{ATTENTION}.qkv_proj": (Q + KV, 64)}, r"tensor model.layers.1.self_attn.qkv_proj has the wrong shape"),
        (
            {f"{ATTENTION}.qkv_proj": (Q + 2 * KV, 32)},
            r"qkv_proj has the wrong shape: A \(2, 32\), B \(128, 2\).*needs",
        ),
        ({f"{MLP}.gate_up_proj": (FF, 64)}, r"gate_up_proj has the wrong shape.*B \(192, 2\)"),
        (
            {f"{ATTENTION}.qkv_proj": (Q + 2 * KV, 64), f"{ATTENTION}.k_proj": (KV, 64)},
            r"modules .*k_proj and .*qkv_proj are both tensor blk.1.attn_k.weight",
        ),
        (
            {f"{ATTENTION}.q_proj": (Q, 64), f"{ATTENTION.removeprefix('model.')}.q_proj": (Q, 64)},
            r"modules .* are both tensor blk.1.attn_q.weight",
        ),
    ],
)
def test_modules_that_do_not_fit_a_split_base_are_refused(llama, tmp_path, shapes, reason):
    with pytest.raises(InvalidAdapterFile, match=reason):
        read(tmp_path, llama, shapes)


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (
            {f"{ATTENTION}.q_proj": (KV, 64)},
            r"q_proj has the wrong shape: A \(2, 64\), B \(32, 2\).*needs.*B \(64, 2\)",
        ),
        ({f"{MLP}.up_proj": (2 * FF, 64)}, r"up_proj has the wrong shape.*needs.*B \(96, 2\)"),
        ({f"{MLP}.up_proj": (FF, 64), f"{MLP}.gate_up_proj": (2 * FF, 64)}, r"are both tensor blk.1.ffn_up.weight"),
    ],
)
def test_modules_that_do_not_fit_a_fused_base_are_refused(phi3, tmp_path, shapes, reason):
    with pytest.raises(InvalidAdapterFile, match=reason):
        read(tmp_path, phi3, shapes)


def test_ranks_add_up_in_a_fused_tensor_and_only_there(phi3, tmp_path):
    shapes = {f"{ATTENTION}.{leaf}": (rows, 64) for leaf, rows in (("q_proj", Q), ("k_proj", KV), ("v_proj", KV))}
    tensors = random_peft_tensors(shapes, ranks=400)
    with pytest.raises(InvalidAdapterFile, match=r"tensor blk.1.attn_qkv.weight has rank 1200; 1 to 1024"):
        read_adapter("x", make_peft_folder(tmp_path, tensors), phi3)


def test_weights_that_overflow_when_scales_are_folded_are_refused(phi3, tmp_path):
    shapes = {f"{ATTENTION}.q_proj": (Q, 64), f"{ATTENTION}.v_proj": (KV, 64)}
    config = peft_config(alpha_pattern={"v_proj": 3e38, "q_proj": 1e38})
    folder = make_peft_folder(tmp_path, random_peft_tensors(shapes, std=10), config)
    with pytest.raises(InvalidAdapterFile, match="times alpha over rank are too large for float32"):
        read_adapter("x", folder, phi3)


def test_heads_that_do_not_divide_the_rows_are_refused(tmp_path):
    kind = BY_NAME["llama"]
    tensors = gguf_weights(kind, random_weights(kind))
    tensors["blk.1.attn_q.weight"] = np.zeros((60, 64), np.float32)
    base = BaseModel.from_gguf(write_model(tmp_path / "x.gguf", kind, tensors))
    with pytest.raises(InvalidAdapterFile, match="60 rows do not divide into the base model's 4 heads"):
        read(tmp_path, base, {f"{ATTENTION}.q_proj": (60, 64)})
    fused = gguf_weights(kind, random_weights(kind), fuse_qkv=True)
    fused["blk.1.attn_qkv.weight"] = np.zeros((120, 64), np.float32)
    base = BaseModel.from_gguf(write_model(tmp_path / "y.gguf", kind, fused))
    with pytest.raises(InvalidAdapterFile, match="120 rows do not divide into q, k and v of 4 heads"):
        read(tmp_path, base, {f"{ATTENTION}.q_proj": (60, 64)})


def test_every_matrix_of_every_architecture_has_a_place(tmp_path):
    for kind in KINDS:
        names = ModuleNames(base_of(tmp_path / f"{kind.architecture}.gguf", kind))
        assert all(names.places(module) for module in module_shapes(kind))
