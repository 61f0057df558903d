import json
import math
from pathlib import Path

import numpy as np
import pytest

from gguf_tools import (
    gguf_name,
    make_peft_folder,
    make_tiny_llama,
    peft_config,
    random_peft_tensors,
    safetensors_bytes,
    tiny_llama_shapes,
)
from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.read import read_adapter
from loraproxy.adapters.tensors import Op
from loraproxy.errors import InvalidAdapterFile

DEMO = Path(__file__).parents[2] / "loraproxy" / "demo"
SHAPES = tiny_llama_shapes()
Q, K, V = (f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
PREFIX = "base_model.model."


def tensors_of(*modules, **kwargs):
    return random_peft_tensors({module: SHAPES[module] for module in modules}, **kwargs)


def refusal(folder, base) -> str:
    with pytest.raises(InvalidAdapterFile) as caught:
        read_adapter("x", folder, base)
    assert caught.value.status == 400
    prefix = f"adapter 'x' ({folder}): "
    assert caught.value.message.startswith(prefix)
    return caught.value.message.removeprefix(prefix)


def interleave_halves(rows, n_head):
    """Within each head, row 2i of the result is row i of the first half, row 2i + 1 is row i of the second."""
    size = rows.shape[0] // n_head
    order = [
        head * size + half * (size // 2) + i for head in range(n_head) for i in range(size // 2) for half in (0, 1)
    ]
    return rows[order]


def test_every_matrix_of_a_llama_model_finds_its_tensor(tmp_path, base):
    adapter = read_adapter("x", make_peft_folder(tmp_path / "x", random_peft_tensors(SHAPES)), base)
    assert {tensor.target for tensor in adapter.tensors} == {gguf_name(module) for module in SHAPES}
    assert (adapter.name, adapter.source, adapter.path) == ("x", "peft", tmp_path / "x")
    assert adapter.notes == ("LoRA: scale = 8 / 4 = 2",)
    assert adapter.tensors[0].target == "token_embd.weight"
    for tensor in adapter.tensors:
        assert tensor.scale == 2.0
        assert tensor.a.dtype == tensor.b.dtype == np.float32
        assert tensor.a.flags.c_contiguous
        assert tensor.b.flags.c_contiguous


def test_query_and_key_rows_are_interleaved_by_head_and_others_are_not(tmp_path, base):
    tensors = tensors_of(Q, K, V)
    adapter = read_adapter("x", make_peft_folder(tmp_path, tensors), base)
    by_target = {tensor.target: tensor for tensor in adapter.tensors}
    for module, n_head in ((Q, 4), (K, 2), (V, None)):
        a, b = (tensors[f"{PREFIX}{module}.lora_{half}.weight"] for half in "AB")
        expected = b if n_head is None else interleave_halves(b, n_head)
        np.testing.assert_array_equal(by_target[gguf_name(module)].b, expected)
        np.testing.assert_array_equal(by_target[gguf_name(module)].a, a)


def test_head_counts_may_differ_from_layer_to_layer(tmp_path):
    counts = {"head_count": [4, 2], "head_count_kv": [2, 1]}
    base = BaseModel.from_gguf(make_tiny_llama(tmp_path / "tiny.gguf", metadata=counts))
    assert (base.n_head, base.n_head_kv) == ((4, 2), (2, 1))
    second = Q.replace("layers.0", "layers.1")
    tensors = tensors_of(second)
    (tensor,) = read_adapter("x", make_peft_folder(tmp_path / "x", tensors), base).tensors
    np.testing.assert_array_equal(tensor.b, interleave_halves(tensors[f"{PREFIX}{second}.lora_B.weight"], 2))


def test_the_token_embedding_becomes_a_correction_of_looked_up_rows(tmp_path, base):
    tensors = tensors_of("model.embed_tokens")
    (tensor,) = read_adapter("x", make_peft_folder(tmp_path, tensors), base).tensors
    assert (tensor.target, tensor.op) == ("token_embd.weight", Op.GET_ROWS)
    assert (tensor.a.shape, tensor.b.shape) == ((4, 320), (64, 4))
    np.testing.assert_array_equal(tensor.a, tensors[f"{PREFIX}model.embed_tokens.lora_embedding_A"])


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_a_product_whether_or_not_the_base_ties_it(tmp_path, tied):
    base = BaseModel.from_gguf(make_tiny_llama(tmp_path / "tiny.gguf", tied=tied))
    assert base.tied_output is tied
    folder = make_peft_folder(tmp_path / "x", random_peft_tensors({"lm_head": (320, 64)}))
    (tensor,) = read_adapter("x", folder, base).tensors
    assert (tensor.target, tensor.op, tensor.b.shape) == ("output.weight", Op.MUL_MAT, (320, 4))


def test_an_adapter_of_the_bare_model_without_its_head_is_read_alike(tmp_path, base):
    tensors = tensors_of(Q, V)
    bare = {name.replace(f"{PREFIX}model.", PREFIX): values for name, values in tensors.items()}
    whole = read_adapter("x", make_peft_folder(tmp_path / "whole", tensors), base)
    stripped = read_adapter("x", make_peft_folder(tmp_path / "bare", bare), base)
    for left, right in zip(whole.tensors, stripped.tensors, strict=True):
        assert left.target == right.target
        np.testing.assert_array_equal(left.b, right.b)


def test_names_that_still_hold_the_adapters_name_are_read(tmp_path, base):
    named = {name.replace(".weight", ".default.weight"): values for name, values in tensors_of(V).items()}
    (tensor,) = read_adapter("x", make_peft_folder(tmp_path, named), base).tensors
    assert tensor.target == "blk.0.attn_v.weight"


def test_half_precision_weights_are_widened_exactly(tmp_path, base):
    tensors = tensors_of(V)
    a = tensors[f"{PREFIX}{V}.lora_A.weight"]
    truncated = (a.view(np.uint32) & 0xFFFF0000).view(np.float32)
    for dtype, expected in (("F16", a.astype(np.float16).astype(np.float32)), ("BF16", truncated)):
        (tensor,) = read_adapter("x", make_peft_folder(tmp_path / dtype, tensors, dtype=dtype), base).tensors
        np.testing.assert_array_equal(tensor.a, expected)


def test_the_wizard_of_the_demo_has_the_rank_stabilised_scale():
    shapes = tiny_llama_shapes(n_layer=30, n_embd=576, n_head=9, n_head_kv=3, n_ff=1536, n_vocab=49152)
    tensors = {gguf_name(module): shape for module, shape in shapes.items()}
    smollm2 = BaseModel(Path("smollm2.gguf"), "llama", "SmolLM2", 30, 49152, (9,) * 30, (3,) * 30, tensors)
    wizard = read_adapter("wizard", DEMO / "wizard", smollm2)
    assert json.loads((DEMO / "wizard" / "adapter_config.json").read_text())["use_rslora"] is True
    assert len(wizard.tensors) == 90
    assert {round(tensor.scale, 2) for tensor in wizard.tensors} == {2.83}
    assert wizard.notes == ("rsLoRA: scale = 8 / sqrt(8) = 2.83",)


def test_patterns_give_modules_their_own_rank_and_alpha(tmp_path, base):
    other = V.replace("layers.0", "layers.1")
    tensors = tensors_of(Q, V, other, ranks={Q: 4, V: 16, other: 2})
    config = peft_config(
        rank_pattern={"layers.0.self_attn.v_proj": 16, "v_proj": 2},
        alpha_pattern={r"layers\.0\..*v_proj": 4, "v_proj": 5, "q": 100},
    )
    adapter = read_adapter("x", make_peft_folder(tmp_path, tensors, config), base)
    scales = {tensor.target: tensor.scale for tensor in adapter.tensors}
    # "q" matches no whole name after a dot, and the first pattern that matches decides
    assert scales == {"blk.0.attn_q.weight": 8 / 4, "blk.0.attn_v.weight": 4 / 16, "blk.1.attn_v.weight": 5 / 2}


def test_rank_stabilised_scale_uses_each_pairs_own_rank(tmp_path, base):
    config = peft_config(use_rslora=True, lora_alpha=6, rank_pattern={"v_proj": 9})
    tensors = tensors_of(Q, V, ranks={Q: 4, V: 9})
    adapter = read_adapter("x", make_peft_folder(tmp_path, tensors, config), base)
    assert [tensor.scale for tensor in adapter.tensors] == [6 / math.sqrt(4), 6 / math.sqrt(9)]


def test_fan_in_fan_out_describes_the_base_weight_and_changes_no_pair(tmp_path, base):
    tensors = tensors_of(V)
    plain = read_adapter("x", make_peft_folder(tmp_path / "p", tensors), base)
    fan = read_adapter("x", make_peft_folder(tmp_path / "f", tensors, peft_config(fan_in_fan_out=True)), base)
    np.testing.assert_array_equal(plain.tensors[0].b @ plain.tensors[0].a, fan.tensors[0].b @ fan.tensors[0].a)


def test_the_base_embedding_that_peft_saves_along_is_left_out_with_a_note(tmp_path, base):
    tensors = tensors_of("model.embed_tokens")
    tensors[f"{PREFIX}model.embed_tokens.base_layer.weight"] = np.zeros((320, 64), np.float32)
    adapter = read_adapter("x", make_peft_folder(tmp_path, tensors), base)
    assert len(adapter.tensors) == 1
    assert adapter.notes[-1] == "left out, being the base model's own weights: model.embed_tokens"


def test_the_digest_follows_weights_and_configuration(tmp_path, base):
    tensors = tensors_of(V)
    first = read_adapter("x", make_peft_folder(tmp_path / "1", tensors), base).digest
    assert read_adapter("y", make_peft_folder(tmp_path / "2", tensors), base).digest == first
    assert read_adapter("x", make_peft_folder(tmp_path / "3", tensors, peft_config(lora_alpha=9)), base).digest != first
    assert read_adapter("x", make_peft_folder(tmp_path / "4", tensors_of(V, seed=1)), base).digest != first
    assert len(first) == 64


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only 'LORA' is supported"),
        ({"peft_type": None}, "peft_type is None; only 'LORA' is supported"),
        ({"use_dora": True}, "DoRA (use_dora)"),
        ({"layer_replication": [[0, 2]]}, "layer_replication changes the base model's layers"),
        ({"alora_invocation_tokens": [1, 2]}, "activated LoRA"),
        ({"trainable_token_indices": [5]}, "replacing rows of the embedding (trainable_token_indices)"),
        ({"target_parameters": ["w"]}, "adapting tensors that are no modules (target_parameters)"),
        ({"init_lora_weights": "pissa_niter_4"}, "save it again with PEFT's path_initial_model_for_weight_conversion"),
        ({"lora_alpha": None}, "lora_alpha must be a number, not None"),
        ({"lora_alpha": True}, "lora_alpha must be a number, not True"),
        ({"lora_alpha": 0}, "lora_alpha must be a finite number other than 0"),
        ({"lora_alpha": math.nan}, "lora_alpha must be a finite number other than 0"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a finite number other than 0"),
        ({"lora_alpha": 1e200}, "has the scale 2.5e+199, which is not a finite number"),
        ({"alpha_pattern": ["v_proj"]}, "alpha_pattern must be an object, not ['v_proj']"),
        ({"alpha_pattern": {"v_proj": "8"}}, "alpha_pattern['v_proj'] must be a number"),
        ({"alpha_pattern": {"v_(proj": 8}}, "the pattern 'v_(proj' is wrong"),
        ({"alpha_pattern": {"(a+)+": 8}}, "repeats groups"),
        ({"alpha_pattern": {".*.*.*x": 8}}, "has more than 2 repetitions"),
        ({"alpha_pattern": {f"{i}": 8 for i in range(2049)}}, "more than 2048 entries"),
        ({"alpha_pattern": {"a" * 300: 8}}, "is longer than 256"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false, not 'yes'"),
    ],
)
def test_what_is_no_plain_lora_is_refused_by_its_configuration(tmp_path, base, config, reason):
    assert reason in refusal(make_peft_folder(tmp_path, tensors_of(V), peft_config(**config)), base)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '"LORA"', "\xff"])
def test_a_configuration_that_is_no_json_object_is_refused(tmp_path, base, text):
    folder = make_peft_folder(tmp_path, tensors_of(V))
    (folder / "adapter_config.json").write_bytes(text.encode("latin-1"))
    assert "adapter_config.json is not" in refusal(folder, base)


def test_weight_tying_needs_both_ends_of_the_model(tmp_path, base):
    config = peft_config(ensure_weight_tying=True)
    shapes = {"model.embed_tokens": (320, 64)}
    message = refusal(make_peft_folder(tmp_path / "1", random_peft_tensors(shapes), config), base)
    assert message.startswith("ensure_weight_tying is set, but only token_embd.weight is adapted")
    both = make_peft_folder(tmp_path / "2", random_peft_tensors({**shapes, "lm_head": (320, 64)}), config)
    assert len(read_adapter("x", both, base).tensors) == 2


def test_an_adapter_that_was_initialised_beside_a_rounded_base_says_what_that_means(tmp_path, base):
    folder = make_peft_folder(tmp_path, tensors_of(V), peft_config(init_lora_weights="loftq"))
    notes = read_adapter("x", folder, base).notes
    assert any(note.startswith("LoftQ (init_lora_weights): trained to make up for the rounding") for note in notes)
    for init in (True, "gaussian", "eva", "orthogonal"):
        folder = make_peft_folder(tmp_path, tensors_of(V), peft_config(init_lora_weights=init))
        assert not any("init_lora_weights" in note for note in read_adapter("x", folder, base).notes)


def with_tensor(name, values):
    def change(tensors):
        tensors[PREFIX + name] = np.asarray(values, np.float32)

    return change


def without(name):
    def change(tensors):
        del tensors[PREFIX + name]

    return change


ZEROS = np.zeros((4, 64), np.float32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without(f"{V}.lora_B.weight"), f"half of a pair is missing: {V}.lora_B"),
        (without(f"{V}.lora_A.weight"), f"half of a pair is missing: {V}.lora_A"),
        (with_tensor(f"{V}.lora_magnitude_vector", np.ones(32)), "DoRA (use_dora)"),
        (with_tensor(f"{V}.lora_B.bias", np.ones(32)), "a trained bias"),
        (
            with_tensor("lm_head.weight", np.ones((320, 64))),
            "or a resized vocabulary) is not supported (base_model.model.lm_head.weight)",
        ),
        (with_tensor(f"{V}.lora_C.weight", ZEROS), "tensors that belong to no plain LoRA"),
        (with_tensor(f"{V}.lora_A.weight", np.zeros((4, 65))), "has the wrong shape: A (4, 65), B (32, 4)"),
        (with_tensor(f"{V}.lora_A.weight", np.zeros((5, 64))), "are no low-rank pair"),
        (with_tensor(f"{V}.lora_A.weight", np.zeros(64)), "are no low-rank pair"),
        (with_tensor(f"{V}.lora_A.weight", np.full((4, 64), np.nan)), "holds NaN or infinite weights"),
        (with_tensor(f"{V}.lora_B.weight", np.full((32, 4), np.inf)), "holds NaN or infinite weights"),
        (with_tensor(f"{V}.lora_A.other.weight", ZEROS), f"module {V} has more than one lora_A"),
        (with_tensor(f"{V}.lora_embedding_A", ZEROS), f"module {V} has both lora_A/B and lora_embedding_A/B"),
    ],
)
def test_weights_that_are_no_plain_lora_are_refused_by_name(tmp_path, base, change, reason):
    tensors = tensors_of(V)
    change(tensors)
    assert reason in refusal(make_peft_folder(tmp_path, tensors), base)


@pytest.mark.parametrize(
    "module", ["model.layers.2.self_attn.v_proj", "transformer.h.0.attn.c_attn", "model.layers.0.x"]
)
def test_modules_the_base_lacks_are_refused_with_the_base_the_adapter_names(tmp_path, base, module):
    message = refusal(make_peft_folder(tmp_path, random_peft_tensors({module: (32, 64)})), base)
    assert message == (
        f"modules that the llama model 'Tiny' does not have: {module}; use an adapter that was trained for this base "
        "model (its adapter_config.json names the base 'someone/tiny-llama')"
    )


def test_a_pair_with_the_wrong_kind_of_halves_for_its_tensor_is_refused(tmp_path, base):
    linear = {f"{PREFIX}model.embed_tokens.lora_A.weight": ZEROS}
    linear[f"{PREFIX}model.embed_tokens.lora_B.weight"] = np.zeros((320, 4), np.float32)
    assert "lora_A/B tensors, which do not fit tensor token_embd" in refusal(make_peft_folder(tmp_path, linear), base)


def test_a_resized_vocabulary_is_refused(tmp_path, base):
    tensors = tensors_of("model.embed_tokens")
    tensors[f"{PREFIX}model.embed_tokens.base_layer.weight"] = np.zeros((330, 64), np.float32)
    assert "the vocabulary was resized" in refusal(make_peft_folder(tmp_path, tensors), base)


@pytest.mark.parametrize("rank", [0, 1025])
def test_a_rank_beyond_the_limits_is_refused(tmp_path, base, rank):
    tensors = random_peft_tensors({V: SHAPES[V]}, ranks=rank)
    assert f"has rank {rank}; 1 to 1024 are supported" in refusal(make_peft_folder(tmp_path, tensors), base)


def test_an_adapter_without_tensors_is_refused(tmp_path, base):
    assert "holds no lora_A/lora_B tensors" in refusal(make_peft_folder(tmp_path, {}), base)


def test_a_type_that_cannot_be_read_is_refused(tmp_path, base):
    message = refusal(make_peft_folder(tmp_path, tensors_of(V), dtype="F64"), base)
    assert message.startswith("tensors of a type that cannot be read")
    assert message.endswith("save them as F32, F16 or BF16")


def test_pickled_weights_are_refused_with_the_way_out(tmp_path, base):
    folder = make_peft_folder(tmp_path, tensors_of(V))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "safe_serialization=True" in refusal(folder, base)


def test_a_folder_that_is_no_peft_folder_is_refused(tmp_path, base):
    assert "has no adapter_config.json; give a GGUF file or a PEFT folder" in refusal(tmp_path, base)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "has no adapter_model.safetensors" in refusal(tmp_path, base)


def test_an_architecture_without_known_rules_is_refused_with_the_way_out(tmp_path):
    base = BaseModel.from_gguf(make_tiny_llama(tmp_path / "g.gguf", architecture="gpt2"))
    message = refusal(make_peft_folder(tmp_path / "x", tensors_of(V)), base)
    assert message.startswith("PEFT folders for the architecture 'gpt2' cannot be read yet (known: gemma, ")
    assert "convert_lora_to_gguf.py" in message


@pytest.mark.parametrize("keep", [0, 7, 8, 50, -1])
def test_truncated_weights_are_refused(tmp_path, base, keep):
    folder = make_peft_folder(tmp_path, tensors_of(V))
    whole = safetensors_bytes(tensors_of(V))
    (folder / "adapter_model.safetensors").write_bytes(whole[:keep])
    message = refusal(folder, base)
    assert "is truncated or damaged" in message or "is damaged" in message
