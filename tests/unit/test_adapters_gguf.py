import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from gguf_tools import (
    gguf_name,
    make_gguf_adapter,
    make_peft_folder,
    make_tiny_llama,
    peft_config,
    random_peft_tensors,
    tiny_llama_shapes,
)
from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.gguf_write import write_gguf_adapter
from loraproxy.adapters.read import read_adapter
from loraproxy.adapters.tensors import Op
from loraproxy.errors import InvalidAdapterFile, InvalidRequest

SHAPES = tiny_llama_shapes()
V = "blk.0.attn_v.weight"


@pytest.fixture(scope="module")
def untied(tmp_path_factory) -> BaseModel:
    return BaseModel.from_gguf(make_tiny_llama(tmp_path_factory.mktemp("base") / "untied.gguf", tied=False))


def pair(target=V, n_out=32, n_in=64, rank=4, seed=0):
    random = np.random.default_rng(seed)
    a, b = random.normal(0, 1, (rank, n_in)), random.normal(0, 1, (n_out, rank))
    return {f"{target}.lora_a": a.astype(np.float32), f"{target}.lora_b": b.astype(np.float32)}


def refusal(path, base) -> str:
    with pytest.raises(InvalidAdapterFile) as caught:
        read_adapter("x", path, base)
    prefix = f"adapter 'x' ({path}): "
    assert caught.value.message.startswith(prefix)
    return caught.value.message.removeprefix(prefix)


@pytest.mark.parametrize(("alpha", "scale"), [(8.0, 2.0), (-2.0, -0.5), (0.0, 1.0), (None, 1.0)])
def test_alpha_divides_by_rank_and_no_alpha_means_scale_1(tmp_path, base, alpha, scale):
    tensors = pair()
    adapter = read_adapter("x", make_gguf_adapter(tmp_path / "x.gguf", tensors, alpha=alpha), base)
    (tensor,) = adapter.tensors
    assert (tensor.target, tensor.op, tensor.scale, tensor.rank) == (V, Op.MUL_MAT, scale, 4)
    assert (adapter.source, adapter.notes) == ("gguf", ())
    np.testing.assert_array_equal(tensor.a, tensors[f"{V}.lora_a"])
    np.testing.assert_array_equal(tensor.b, tensors[f"{V}.lora_b"])


@pytest.mark.parametrize(
    ("dtype", "error"), [("F32", 0), ("F16", 1e-3), ("BF16", 8e-3), ("Q8_0", 2e-2), ("Q5_1", 0.2), ("Q4_0", 0.5)]
)
def test_quantised_weights_are_read(tmp_path, base, dtype, error):
    tensors = pair(rank=32)
    path = make_gguf_adapter(tmp_path / "x.gguf", tensors, dtype=GGMLQuantizationType[dtype])
    (tensor,) = read_adapter("x", path, base).tensors
    assert np.abs(tensor.a - tensors[f"{V}.lora_a"]).max() <= error
    assert np.abs(tensor.b - tensors[f"{V}.lora_b"]).max() <= error


def test_a_token_embedding_has_its_a_stored_by_token(tmp_path, base):
    random = np.random.default_rng(0)
    a, b = random.normal(0, 1, (320, 4)).astype(np.float32), random.normal(0, 1, (64, 4)).astype(np.float32)
    tensors = {"token_embd.weight.lora_a": a, "token_embd.weight.lora_b": b}
    (tensor,) = read_adapter("x", make_gguf_adapter(tmp_path / "x.gguf", tensors), base).tensors
    assert (tensor.op, tensor.scale) == (Op.GET_ROWS, 2.0)
    np.testing.assert_array_equal(tensor.a, a.T)
    np.testing.assert_array_equal(tensor.b, b)


def test_norm_vectors_are_left_out_as_llama_cpp_does_with_a_note(tmp_path, base):
    tensors = {**pair(), "blk.0.attn_norm.weight": np.ones(64, np.float32)}
    adapter = read_adapter("x", make_gguf_adapter(tmp_path / "x.gguf", tensors), base)
    assert len(adapter.tensors) == 1
    assert adapter.notes == ("ignored as llama.cpp ignores them: blk.0.attn_norm.weight",)


def zeros(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("tensors", "settings", "reason"),
    [
        (pair(), {"architecture": "qwen2"}, "for the architecture 'qwen2', the base model is a llama model 'Tiny'"),
        (pair(), {"kind": "model"}, "the file is a model, not an adapter (general.type is 'model'"),
        (pair(), {"adapter_type": "ia3"}, "adapter.type is 'ia3'; only 'lora' is supported"),
        (pair(), {"invocation_tokens": [1, 2]}, "activated LoRA"),
        (pair(), {"alpha": float("nan")}, "adapter.lora.alpha is nan"),
        (pair("blk.2.attn_v.weight"), {}, "tensors that the llama model 'Tiny' does not have: blk.2.attn_v.weight"),
        (pair("blk.0.attn_norm.weight"), {}, "has 1 dimensions in the base model; only matrices"),
        (pair(n_in=65), {}, f"tensor {V} has the wrong shape: A (4, 65), B (32, 4)"),
        (pair(n_out=64), {}, f"tensor {V} has the wrong shape"),
        (pair(rank=1025), {}, "has rank 1025; 1 to 1024 are supported"),
        ({f"{V}.lora_a": zeros(4, 64)}, {}, f"half of a pair is missing: {V}.lora_b"),
        ({f"{V}.lora_b": zeros(32, 4)}, {}, f"half of a pair is missing: {V}.lora_a"),
        ({f"{V}.lora_a": zeros(4, 64), f"{V}.lora_b": zeros(32, 5)}, {}, "are no low-rank pair"),
        ({f"{V}.lora_a": zeros(64), f"{V}.lora_b": zeros(32, 4)}, {}, "are no low-rank pair"),
        (
            {f"{V}.lora_a": np.full((4, 64), np.inf, np.float32), f"{V}.lora_b": zeros(32, 4)},
            {},
            "holds NaN or infinite weights",
        ),
        (
            {**pair(), "blk.0.attn_v.bias": zeros(32)},
            {},
            "neither lora_a nor lora_b, and so no plain LoRA (blk.0.attn_v.bias)",
        ),
        ({"blk.0.attn_norm.weight": zeros(64)}, {}, "the file holds no lora_a/lora_b tensors"),
    ],
)
def test_what_cannot_be_applied_is_refused_by_name(tmp_path, base, tensors, settings, reason):
    assert reason in refusal(make_gguf_adapter(tmp_path / "x.gguf", tensors, **settings), base)


def test_alpha_of_another_type_is_refused(tmp_path, base):
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_uint32("adapter.lora.alpha", 8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "adapter.lora.alpha must be a float32 number" in refusal(tmp_path / "x.gguf", base)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a GGUF file"),
        (b"GGU", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file (it does not begin with 'GGUF')"),
        (b"GGUF", "the file ends within the header: it is truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "(a big-endian file?)"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "1152921504606846976 tensors, more than 0 bytes can hold"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "the file is truncated or damaged"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62) + bytes(64),
            "a metadata key is 4611686018427387904 bytes long",
        ),
        (b"GGUF" + struct.pack("<IQQQ4sI", 3, 0, 1, 4, b"abcd", 99) + bytes(64), "abcd has the unknown value type 99"),
        (b"GGUF" + struct.pack("<IQQQ4sIIQ", 3, 0, 1, 4, b"abcd", 9, 8, 2**61), "the file ends within abcd"),
        (b"GGUF" + struct.pack("<IQQQ4sIIQ", 3, 0, 1, 4, b"abcd", 9, 5, 2**61), "the file ends within abcd"),
        (b"GGUF" + struct.pack("<IQQQ4sIIQ", 3, 0, 1, 4, b"abcd", 9, 9, 1) + bytes(64), "abcd is an array of arrays"),
    ],
)
def test_numbers_in_a_hostile_header_are_checked_before_they_are_used(tmp_path, base, content, reason):
    (tmp_path / "x.gguf").write_bytes(content)
    assert reason in refusal(tmp_path / "x.gguf", base)


def test_every_truncation_is_refused_as_such(tmp_path, base):
    whole = make_gguf_adapter(tmp_path / "whole.gguf", pair()).read_bytes()
    cut = tmp_path / "cut.gguf"
    # the writer pads the last tensor; the file is whole without that
    for size in [*range(0, 400, 13), 1000, len(whole) - 32]:
        cut.write_bytes(whole[:size])
        message = refusal(cut, base)
        assert "truncated or damaged" in message or "not a GGUF file" in message


def test_what_is_neither_file_nor_folder_is_refused(tmp_path, base):
    assert "No such file" in refusal(tmp_path / "missing.gguf", base)
    (tmp_path / "text.gguf").write_text("hello")
    assert "not a GGUF file" in refusal(tmp_path / "text.gguf", base)
    folder = make_peft_folder(tmp_path / "peft", {})
    assert "give the folder instead" in refusal(folder / "adapter_model.safetensors", base)
    assert refusal(Path("/dev/null"), base) == "null is not a regular file"
    assert "File name too long" in refusal(tmp_path / ("x" * 300), base)
    with pytest.raises(InvalidAdapterFile, match="null character"):
        read_adapter("x", Path("a\0b"), base)


def test_the_base_model_is_no_adapter_and_an_adapter_no_base_model(tmp_path, base):
    assert "the file is a model, not an adapter" in refusal(base.path, base)
    with pytest.raises(InvalidRequest, match=r"general.type is 'adapter'; a base model has 'model'"):
        BaseModel.from_gguf(make_gguf_adapter(tmp_path / "x.gguf", pair()))


def test_the_digest_is_the_files_own(tmp_path, base):
    first = read_adapter("x", make_gguf_adapter(tmp_path / "1.gguf", pair()), base).digest
    assert read_adapter("y", make_gguf_adapter(tmp_path / "2.gguf", pair()), base).digest == first
    assert read_adapter("x", make_gguf_adapter(tmp_path / "3.gguf", pair(seed=1)), base).digest != first


def effective(adapter):
    return {tensor.target: np.float64(tensor.scale) * (tensor.b @ tensor.a) for tensor in adapter.tensors}


@pytest.mark.parametrize(("dtype", "error"), [("f32", 1e-6), ("f16", 2e-3), ("bf16", 1e-2), ("q8_0", 1e-2)])
def test_a_peft_adapter_written_as_gguf_has_the_same_effective_weights(tmp_path, untied, dtype, error):
    shapes = {**SHAPES, "lm_head": (320, 64)}
    ranks = {module: 1 + 7 * i % 33 for i, module in enumerate(shapes)}
    config = peft_config(use_rslora=True, lora_alpha=6, alpha_pattern={"v_proj": 11, r"layers\.1\..*": 3})
    folder = make_peft_folder(tmp_path / "peft", random_peft_tensors(shapes, ranks=ranks), config)
    peft = read_adapter("x", folder, untied)
    write_gguf_adapter(peft, untied, tmp_path / "x.gguf", dtype)
    written = read_adapter("x", tmp_path / "x.gguf", untied)
    expected, got = effective(peft), effective(written)
    assert expected.keys() == got.keys() == {gguf_name(module) for module in shapes}
    for target in expected:
        assert np.abs(got[target] - expected[target]).max() <= error * np.abs(expected[target]).max()
    assert [tensor.op for tensor in written.tensors] == [tensor.op for tensor in peft.tensors]
    assert all(tensor.scale == 1.0 for tensor in written.tensors)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["peft", "x.gguf"]


@pytest.mark.parametrize("module", ["model.embed_tokens", "lm_head"])
def test_adapters_of_a_tied_tensor_are_not_written_for_llama_cpp(tmp_path, base, module):
    folder = make_peft_folder(tmp_path / "peft", random_peft_tensors({module: (320, 64)}))
    with pytest.raises(InvalidAdapterFile, match="shares one tensor between embedding and output head"):
        write_gguf_adapter(read_adapter("x", folder, base), base, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


def test_weights_too_large_for_the_type_are_not_written(tmp_path, base):
    adapter = read_adapter("x", make_gguf_adapter(tmp_path / "1.gguf", pair()), base)
    large = replace(adapter, tensors=tuple(replace(tensor, scale=1e30) for tensor in adapter.tensors))
    with pytest.raises(InvalidAdapterFile, match=r"attn_v.weight.lora_b are too large for F16; use f32"):
        write_gguf_adapter(large, base, tmp_path / "2.gguf", "f16")
    assert [entry.name for entry in tmp_path.iterdir()] == ["1.gguf"]
    write_gguf_adapter(large, base, tmp_path / "2.gguf", "f32")
