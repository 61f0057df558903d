"""Surveying adapters: all that a full read finds but the values, and files that change or are none."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors
from gguf import GGMLQuantizationType

from gguf_tools import (
    make_gguf_adapter,
    make_peft_folder,
    make_tiny_llama,
    peft_config,
    random_peft_tensors,
    tiny_llama_shapes,
)
from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.checks import Refused
from loraproxy.adapters.files import CheckedFile, opened
from loraproxy.adapters.gguf_write import write_gguf_adapter
from loraproxy.adapters.read import read_adapter, read_in_turn, survey_adapter
from loraproxy.adapters.safetensors_header import read_safetensors_header
from loraproxy.errors import InvalidAdapterFile

SHAPES = {**tiny_llama_shapes(), "lm_head": (320, 64)}
V = "model.layers.0.self_attn.v_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> BaseModel:
    return BaseModel.from_gguf(make_tiny_llama(tmp_path_factory.mktemp("base") / "tiny.gguf", tied=False))


def every_matrix(folder: Path) -> Path:
    ranks = {module: 1 + 7 * i % 33 for i, module in enumerate(SHAPES)}
    config = peft_config(use_rslora=True, lora_alpha=6, alpha_pattern={"v_proj": 11})
    return make_peft_folder(folder, random_peft_tensors(SHAPES, ranks=ranks), config)


FUSED = {"model.layers.0.self_attn.qkv_proj": (128, 64), "model.layers.1.mlp.gate_up_proj": (192, 64)}


@pytest.mark.parametrize("modules", [SHAPES, FUSED], ids=["apart", "fused"])
def test_pairs_read_in_turn_are_those_of_a_full_read(tmp_path, base, modules):
    folder = make_peft_folder(tmp_path / "peft", random_peft_tensors(modules), peft_config())
    read = read_adapter("x", folder, base)
    pairs = []
    assert read_in_turn("x", folder, base, pairs.append) == read.digest
    assert [(pair.target, pair.op, pair.scale) for pair in pairs] == [(t.target, t.op, t.scale) for t in read.tensors]
    for pair, expected in zip(pairs, read.tensors, strict=True):
        np.testing.assert_array_equal(pair.a, expected.a)
        np.testing.assert_array_equal(pair.b, expected.b)


def test_a_survey_finds_what_a_full_read_finds(tmp_path, base):
    folder = every_matrix(tmp_path / "peft")
    read = read_adapter("x", folder, base)
    surveyed = survey_adapter("x", folder, base)
    assert surveyed == read.summary
    assert (surveyed.name, surveyed.path, surveyed.format) == ("x", folder, "peft")
    assert surveyed.digest == read.digest
    assert surveyed.size_bytes == sum(file.stat().st_size for file in folder.iterdir())
    assert surveyed.n_pairs == len(SHAPES)
    assert surveyed.targets[0] == "token_embd.weight"
    assert surveyed.targets[-1] == "output.weight"
    assert surveyed.rank == (1, 33)
    assert surveyed.base_name == "someone/tiny-llama"
    assert surveyed.notes == read.notes
    path = tmp_path / "x.gguf"
    write_gguf_adapter(read, base, path)
    written = survey_adapter("x", path, base)
    assert written == read_adapter("x", path, base).summary
    assert written.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert written.scale == (1.0, 1.0)
    assert (written.rank, written.targets) == (surveyed.rank, surveyed.targets)
    assert written.resident_bytes == surveyed.resident_bytes


def test_a_survey_does_not_look_at_the_values(tmp_path, base):
    tensors = random_peft_tensors({V: SHAPES[V]})
    tensors[f"base_model.model.{V}.lora_A.weight"][0, 0] = np.nan
    folder = make_peft_folder(tmp_path, tensors)
    assert survey_adapter("x", folder, base).n_pairs == 1
    with pytest.raises(InvalidAdapterFile, match="holds NaN"):
        read_adapter("x", folder, base)


def test_layers_that_the_configuration_does_not_name_are_not_applied_as_peft_does_not(tmp_path, base):
    shapes = {module: shape for module, shape in SHAPES.items() if "v_proj" in module}

    def targets(**config):
        folder = make_peft_folder(tmp_path, random_peft_tensors(shapes), peft_config(**config))
        return survey_adapter("x", folder, base).targets

    both = ("blk.0.attn_v.weight", "blk.1.attn_v.weight")
    assert targets(layers_to_transform=None) == targets(layers_to_transform=[]) == both
    assert targets(layers_to_transform=1) == targets(layers_to_transform=[1, 7]) == both[1:]
    assert targets(layers_to_transform=[0], layers_pattern="layers") == both[:1]
    assert targets(layers_to_transform=[0], layers_pattern=["h", "layers"]) == both[:1]
    with pytest.raises(InvalidAdapterFile, match="no lora_A/lora_B tensors that can be applied"):
        targets(layers_to_transform=[0], layers_pattern="h")
    with pytest.raises(InvalidAdapterFile, match=r"layers_pattern 'l\.\*' has repetitions"):
        targets(layers_to_transform=[0], layers_pattern="l.*")
    make_peft_folder(tmp_path, random_peft_tensors(shapes), peft_config(layers_to_transform=[1]))
    assert survey_adapter("x", tmp_path, base).notes[-1] == (
        f"not applied, being of layers that layers_to_transform does not name: {V}"
    )


def test_another_rank_than_the_configuration_states_is_noted(tmp_path, base):
    tensors = random_peft_tensors({V: SHAPES[V]}, ranks=2)
    notes = survey_adapter("x", make_peft_folder(tmp_path, tensors, peft_config(r=4)), base).notes
    assert notes == (
        "LoRA: scale = 8 / 2 = 4",
        f"another rank than adapter_config.json states, which is the one that counts: {V}",
    )
    config = peft_config(r=4, rank_pattern={"v_proj": 2})
    assert survey_adapter("x", make_peft_folder(tmp_path, tensors, config), base).notes == ("LoRA: scale = 8 / 2 = 4",)


def test_an_embedding_of_gemma_3_needs_a_peft_that_scales_it(tmp_path):
    base = BaseModel.from_gguf(make_tiny_llama(tmp_path / "tiny.gguf", architecture="gemma3"))
    tensors = random_peft_tensors({"model.embed_tokens": (320, 64), V: SHAPES[V]})
    for version in (None, "0.17.1", "0.9"):
        folder = make_peft_folder(tmp_path / "x", tensors, peft_config(peft_version=version))
        with pytest.raises(InvalidAdapterFile, match=r"from PEFT before 0\.18.*\(model.embed_tokens\)"):
            survey_adapter("x", folder, base)
    for version in ("0.18.0", "0.20.1.dev0", "1.0"):
        folder = make_peft_folder(tmp_path / "x", tensors, peft_config(peft_version=version))
        assert survey_adapter("x", folder, base).n_pairs == 2


def test_modules_of_a_model_that_also_sees_are_found(tmp_path, base):
    tensors = random_peft_tensors({"model.language_model.layers.0.self_attn.v_proj": SHAPES[V]})
    tensors |= random_peft_tensors({"language_model.model.layers.1.self_attn.v_proj": SHAPES[V]})
    folder = make_peft_folder(tmp_path, tensors)
    assert survey_adapter("x", folder, base).targets == ("blk.0.attn_v.weight", "blk.1.attn_v.weight")


@pytest.mark.parametrize(("size", "readable"), [(500_000, True), (9 << 20, False)])
def test_a_header_longer_than_the_first_look_is_read_up_to_a_limit(tmp_path, base, size, readable):
    tensors = {"blk.0.attn_v.weight.lora_a": np.ones((4, 64), np.float32)}
    tensors["blk.0.attn_v.weight.lora_b"] = np.ones((32, 4), np.float32)
    path = make_gguf_adapter(tmp_path / "x.gguf", tensors, description="x" * size)
    if readable:
        assert survey_adapter("x", path, base) == read_adapter("x", path, base).summary
    else:
        with pytest.raises(InvalidAdapterFile, match="header is longer than 8388608 bytes, which no adapter needs"):
            survey_adapter("x", path, base)


def test_bytes_after_the_last_tensor_are_no_adapter(tmp_path, base):
    tensors = {"blk.0.attn_v.weight.lora_a": np.ones((4, 64), np.float32)}
    tensors["blk.0.attn_v.weight.lora_b"] = np.ones((32, 4), np.float32)
    path = make_gguf_adapter(tmp_path / "x.gguf", tensors)
    os.truncate(path, 1 << 40)  # no memory is asked for, however large the file
    with pytest.raises(InvalidAdapterFile, match="at most 8589934592 are supported"):
        read_adapter("x", path, base)
    os.truncate(path, 1 << 32)
    with pytest.raises(InvalidAdapterFile, match="bytes follow the last tensor: the file is damaged"):
        read_adapter("x", path, base)


# -- files ---------------------------------------------------------------------------------------------------


def test_what_is_no_regular_file_is_not_opened(tmp_path, base):
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "zero.gguf").symlink_to("/dev/zero")
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    folder = make_peft_folder(tmp_path / "peft", random_peft_tensors({V: SHAPES[V]}))
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")
    odd = make_peft_folder(tmp_path / "odd", random_peft_tensors({V: SHAPES[V]}))
    (odd / "adapter_config.json").unlink()
    (odd / "adapter_config.json").symlink_to("/dev/zero")
    for name, reason in {
        "pipe.gguf": "pipe.gguf is not a regular file",
        "zero.gguf": "zero.gguf is not a regular file",
        "loop.gguf": "Too many levels of symbolic links",
        "peft": "adapter_model.safetensors is not a regular file",
        "odd": "adapter_config.json is not a regular file",
    }.items():
        for look in (read_adapter, survey_adapter):
            with pytest.raises(InvalidAdapterFile, match=reason):
                look("x", tmp_path / name, base)


def test_a_symlink_to_a_file_is_followed(tmp_path, base):
    folder = make_peft_folder(tmp_path / "real", random_peft_tensors({V: SHAPES[V]}))
    (tmp_path / "link").symlink_to(folder)
    assert survey_adapter("x", tmp_path / "link", base).digest == survey_adapter("x", folder, base).digest


@pytest.mark.parametrize("take", [CheckedFile.load, CheckedFile.skim], ids=["load", "skim"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: os.truncate(path, 1000), "became shorter while it was read; try again when it is complete"),
        (lambda path: os.truncate(path, 900_000), "changed while it was read; try again when it is complete"),
        (
            lambda path: (path.write_bytes(bytes(600_000)), os.utime(path, ns=(1, 1))),
            "changed while it was read; try again when it is complete",
        ),
    ],
    ids=["shrinks", "grows", "is written anew"],
)
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, take, change, reason):
    path = tmp_path / "x.gguf"
    path.write_bytes(bytes(600_000))
    with opened(path, 1 << 20) as file:
        file.head(500)
        change(path)
        with pytest.raises(Refused, match=f"x.gguf {reason}"):
            take(file, hashlib.sha256())


def test_what_is_hashed_is_what_was_read(tmp_path):
    path = tmp_path / "x"
    content = np.random.default_rng(0).bytes(700_001)
    path.write_bytes(content)
    for head in (0, 1, 300_000, 10**9):
        digests = hashlib.sha256(), hashlib.sha256()
        with opened(path, 1 << 20) as file:
            assert file.head(head)[:head] == content[:head]
            assert file.load(digests[0]) == content
        with opened(path, 1 << 20) as file:
            file.head(head)
            file.skim(digests[1])
        assert {digest.hexdigest() for digest in digests} == {hashlib.sha256(content).hexdigest()}
    with pytest.raises(Refused, match="x has 700001 bytes; at most 700000 are supported"), opened(path, 700_000):
        pass


# -- the safetensors format, beside the package that defines it ----------------------------------------------


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_the_header_says_what_the_safetensors_package_says(tmp_path, dtype):
    folder = make_peft_folder(tmp_path, random_peft_tensors(SHAPES), dtype=dtype)
    path = folder / "adapter_model.safetensors"
    content = path.read_bytes()
    with opened(path, 1 << 30) as file:
        ours = read_safetensors_header(file)
    theirs = dict(safetensors.deserialize(content))
    assert list(ours) == sorted(theirs)
    for name, tensor in ours.items():
        assert list(tensor.shape) == theirs[name]["shape"]
        assert tensor.type is GGMLQuantizationType[dtype]
        assert content[tensor.offset : tensor.offset + tensor.n_bytes] == bytes(theirs[name]["data"])


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]})


@pytest.mark.parametrize(
    ("header", "n_bytes", "reason"),
    [
        (f'{{"a": {entry(0, 16, [4])}, "b": {entry(8, 24, [4])}}}', 24, "'b' does not begin where the one before it"),
        (f'{{"a": {entry(0, 16, [4])}, "b": {entry(20, 36, [4])}}}', 36, "'b' does not begin where the one before it"),
        (f'{{"a": {entry(0, 16, [4])}}}', 20, "where its header needs"),
        (f'{{"a": {entry(0, 16, [4])}}}', 12, "it is truncated or damaged"),
        (f'{{"a": {entry(0, 16, [5])}}}', 16, "'a' has 16 bytes where its shape needs 20"),
        (f'{{"a": {entry(0, 16, [2**62, 4])}}}', 16, "the entry of 'a' has no valid shape or place"),
        (f'{{"a": {entry(0, 16, [-2, -2])}}}', 16, "the entry of 'a' has no valid shape or place"),
        (f'{{"a": {entry(16, 0, [4])}}}', 16, "'a' has -16 bytes where its shape needs 16"),
        (f'{{"a": {entry(0, 16, [4])}, "a": {entry(0, 16, [4])}}}', 16, "a name appears twice"),
        ('{"a": {"dtype": "F32", "dtype": "F32"}}', 0, "a name appears twice"),
        ('{"a": [1]}', 0, "the entry of 'a' is no tensor"),
        ("[]", 0, "its header is not a JSON object"),
        ("[" * 50_000, 0, "its header is not JSON"),
        (f'{{"{"a" * 300}": {entry(0, 0, [0])}}}', 0, "is longer than 256"),
    ],
)  # fmt: skip
def test_headers_that_make_no_sense_are_refused(tmp_path, header, n_bytes, reason):
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(n_bytes))
    with opened(path, 1 << 20) as file, pytest.raises(Refused, match=reason):
        read_safetensors_header(file)


def test_a_header_of_gigabytes_is_not_read(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes((1 << 31).to_bytes(8, "little"))
    os.truncate(path, 1 << 32)
    with opened(path, 1 << 33) as file, pytest.raises(Refused, match="at most 8388608 are supported"):
        read_safetensors_header(file)
