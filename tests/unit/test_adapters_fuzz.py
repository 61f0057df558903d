"""Damaged adapter files: whatever the bytes, the readers answer with InvalidAdapterFile or read a valid adapter."""

import contextlib
import random
import struct

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from gguf_tools import make_gguf_adapter, make_peft_folder, make_tiny_llama, random_peft_tensors, tiny_llama_shapes
from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.read import read_adapter
from loraproxy.errors import InvalidAdapterFile, InvalidRequest

SHAPES = tiny_llama_shapes(n_layer=1)
EXTREMES = [struct.pack("<Q", value) for value in (0, 1, 31, 2**31, 2**32 - 1, 2**63, 2**64 - 1)]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> BaseModel:
    return BaseModel.from_gguf(make_tiny_llama(tmp_path_factory.mktemp("base") / "tiny.gguf", n_layer=1))


def damage(data: bytes, draw: random.Random, header: int) -> bytes:
    """One to four random changes, most of them in the first ``header`` bytes."""
    damaged = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(min(header, len(damaged)) if draw.random() < 0.8 else len(damaged))
        kind = draw.randrange(6)
        if kind == 0:
            damaged[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            damaged[at : at + 8] = draw.choice(EXTREMES)
        elif kind == 2:
            damaged[at : at + 4] = draw.choice(EXTREMES)[:4]
        elif kind == 3:
            del damaged[at + 1 : at + draw.randint(2, 16)]
        elif kind == 4:
            damaged[at:at] = draw.randbytes(draw.randint(1, 16))
        else:
            del damaged[at + 1 :]
    return bytes(damaged)


def outcome(path, base) -> str:
    """Read whatever lies at ``path``; any error but InvalidAdapterFile fails the test."""
    try:
        adapter = read_adapter("x", path, base)
    except InvalidAdapterFile as error:
        return "refused" if len(error.message) < 1000 else error.message
    for tensor in adapter.tensors:
        assert np.isfinite(tensor.a).all()
        assert np.isfinite(tensor.b).all()
        assert np.isfinite(np.float32(tensor.scale))
    return "read"


@pytest.mark.parametrize("dtype", ["F32", "Q8_0"])
def test_damaged_gguf_adapters_are_refused_or_read(tmp_path, base, dtype):
    draw = random.Random(20)
    rng = np.random.default_rng(0)
    tensors = {}
    for name, (n_out, n_in) in {"attn_v": (32, 64), "ffn_down": (64, 96)}.items():
        for half, shape in {"a": (32, n_in), "b": (n_out, 32)}.items():
            tensors[f"blk.0.{name}.weight.lora_{half}"] = rng.normal(0, 1, shape).astype(np.float32)
    whole = make_gguf_adapter(tmp_path / "whole.gguf", tensors, dtype=GGMLQuantizationType[dtype]).read_bytes()
    header = whole.index(b"ffn_down.weight.lora_b") + 64
    path = tmp_path / "x.gguf"
    outcomes = []
    for _ in range(250):
        path.write_bytes(damage(whole, draw, header))
        outcomes.append(outcome(path, base))
    assert set(outcomes) == {"read", "refused"}


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_damaged_peft_weights_are_refused_or_read(tmp_path, base, dtype):
    draw = random.Random(21)
    folder = make_peft_folder(tmp_path / "x", random_peft_tensors(SHAPES), dtype=dtype)
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    outcomes = []
    for _ in range(250):
        weights.write_bytes(damage(whole, draw, 8 + int.from_bytes(whole[:8], "little")))
        outcomes.append(outcome(folder, base))
    assert set(outcomes) == {"read", "refused"}


def test_damaged_peft_configurations_are_refused_or_read(tmp_path, base):
    draw = random.Random(22)
    folder = make_peft_folder(tmp_path / "x", random_peft_tensors(SHAPES))
    config = folder / "adapter_config.json"
    whole = config.read_bytes()
    outcomes = []
    for _ in range(250):
        config.write_bytes(damage(whole, draw, len(whole)))
        outcomes.append(outcome(folder, base))
    assert set(outcomes) == {"read", "refused"}


def test_damaged_base_models_are_refused_or_read(tmp_path, base):
    draw = random.Random(23)
    whole = base.path.read_bytes()
    header = whole.index(b"ffn_norm.weight") + 64
    path = tmp_path / "x.gguf"
    for _ in range(250):
        path.write_bytes(damage(whole, draw, header))
        with contextlib.suppress(InvalidRequest):
            BaseModel.from_gguf(path)
