"""Damaged and hostile adapter files: whatever the bytes, the readers answer with InvalidAdapterFile or a valid adapter.

More than 20,000 files, half of them damaged blindly and half of them made wrong on purpose, field by field. Every
case has a seed of its own, named where it fails; memory is bounded for each.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import struct
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from gguf_tools import (
    make_gguf_adapter,
    make_peft_folder,
    make_tiny_llama,
    peft_config,
    random_peft_tensors,
    safetensors_bytes,
    tiny_llama_shapes,
)
from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.read import Unsupported, read_adapter, survey_adapter
from loraproxy.errors import InvalidAdapterFile, InvalidRequest
from tiny_models import BY_NAME, Kind, gguf_weights, module_shapes, random_weights, write_model

BLIND, STRUCTURED = 2600, 2700
"""Files of each kind; there are four kinds of each."""
MODULES = ("model.layers.0.self_attn.v_proj", "model.layers.0.mlp.down_proj", "model.embed_tokens")
SHAPES = {module: tiny_llama_shapes(n_layer=1)[module] for module in MODULES}
EXTREMES = [0, 1, 2, 3, 7, 31, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
TRACED = 16
"""Memory is traced in one case of so many, since tracing is slow; the process's peak is checked over all."""
PEAK_PER_BYTE, PEAK_FIXED = 64, 1 << 20
PROCESS_GROWTH = 96 << 20


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> BaseModel:
    return BaseModel.from_gguf(make_tiny_llama(tmp_path_factory.mktemp("base") / "tiny.gguf", n_layer=1))


def outcome(path: Path, base: BaseModel, unsupported: Unsupported) -> str:
    """Read whatever lies at ``path``; any error but InvalidAdapterFile fails the test."""
    try:
        adapter = read_adapter("x", path, base, unsupported=unsupported)
    except InvalidAdapterFile as error:
        return "refused" if len(error.message) < 1500 and error.message.isprintable() else repr(error.message)
    for tensor in adapter.tensors:
        assert np.isfinite(tensor.a).all()
        assert np.isfinite(tensor.b).all()
        assert np.isfinite(np.float32(tensor.scale))
        shape = base.shape_of(tensor.target)
        assert shape in ((tensor.b.shape[0], tensor.a.shape[1]), (tensor.a.shape[1], tensor.b.shape[0]))
    assert survey_adapter("x", path, base, unsupported=unsupported) == adapter.summary
    return "read"


def fuzz(name: str, count: int, path: Path, base: BaseModel, write: Callable[[random.Random], int]) -> Counter[str]:
    """Let ``write`` make ``count`` files at ``path``, each from a seed of its own; it returns a file's size."""
    outcomes: Counter[str] = Counter()
    before = peak_of_process()
    for number in range(count):
        draw = random.Random(f"{name} {number}")
        size = write(draw)
        try:
            if number % TRACED == 0:
                tracemalloc.start()
            outcomes[outcome(path, base, draw.choice(list(Unsupported)))] += 1
            if number % TRACED == 0:
                peak = tracemalloc.get_traced_memory()[1]
                assert peak <= PEAK_FIXED + PEAK_PER_BYTE * size, f"{peak} bytes for a file of {size}"
        except Exception as error:
            raise AssertionError(f"case {name!r} {number}: {error!r}") from error
        finally:
            tracemalloc.stop()
    assert peak_of_process() - before < PROCESS_GROWTH
    return outcomes


def rewrite(path: Path, data: bytes) -> int:
    """Replace a file. Cutting one short and writing it anew would make some file systems write to the disk."""
    path.unlink(missing_ok=True)
    return path.write_bytes(data)


def peak_of_process() -> int:
    """The most memory that this process has held, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def damage(data: bytes, draw: random.Random, header: int) -> bytes:
    """One to four random changes, most of them in the first ``header`` bytes."""
    damaged = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        if not damaged:
            break
        at = draw.randrange(min(header, len(damaged)) if draw.random() < 0.8 else len(damaged))
        kind = draw.randrange(7)
        if kind == 0:
            damaged[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            damaged[at : at + 8] = struct.pack("<Q", draw.choice(EXTREMES))
        elif kind == 2:
            damaged[at : at + 4] = struct.pack("<Q", draw.choice(EXTREMES))[:4]
        elif kind == 3:
            del damaged[at + 1 : at + draw.randint(2, 16)]
        elif kind == 4:
            damaged[at:at] = draw.randbytes(draw.randint(1, 16))
        elif kind == 5:
            damaged += draw.randbytes(draw.randint(1, 64))
        else:
            del damaged[at + 1 :]
    return bytes(damaged)


# -- blind damage --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F32", "Q8_0"])
def test_damaged_gguf_adapters_are_refused_or_read(tmp_path, base, dtype):
    rng = np.random.default_rng(0)
    tensors = {}
    for name, (n_out, n_in) in {"attn_v": (32, 64), "ffn_down": (64, 96)}.items():
        for half, shape in {"a": (32, n_in), "b": (n_out, 32)}.items():
            tensors[f"blk.0.{name}.weight.lora_{half}"] = rng.normal(0, 1, shape).astype(np.float32)
    whole = make_gguf_adapter(tmp_path / "whole.gguf", tensors, dtype=GGMLQuantizationType[dtype]).read_bytes()
    header = whole.index(b"ffn_down.weight.lora_b") + 64
    path = tmp_path / "x.gguf"

    def write(draw: random.Random) -> int:
        return rewrite(path, damage(whole, draw, header))

    assert set(fuzz(f"gguf {dtype}", BLIND, path, base, write)) == {"read", "refused"}


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_damaged_peft_weights_are_refused_or_read(tmp_path, base, dtype):
    folder = make_peft_folder(tmp_path / "x", random_peft_tensors(SHAPES), dtype=dtype)
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")

    def write(draw: random.Random) -> int:
        return rewrite(weights, damage(whole, draw, header))

    assert set(fuzz(f"safetensors {dtype}", BLIND, folder, base, write)) == {"read", "refused"}


def test_damaged_base_models_are_refused_or_read(tmp_path, base):
    whole = base.path.read_bytes()
    header = whole.index(b"ffn_norm.weight") + 64
    path = tmp_path / "x.gguf"
    for number in range(250):
        rewrite(path, damage(whole, random.Random(f"base {number}"), header))
        with contextlib.suppress(InvalidRequest):
            BaseModel.from_gguf(path)


# -- wrong on purpose ----------------------------------------------------------------------------------------


class Gguf:
    """A GGUF file as a list of fields, each of which can be made wrong by itself."""

    def __init__(self) -> None:
        self.fields: list[tuple[str, Any]] = []

    def field(self, fmt: str, value: Any) -> None:
        self.fields.append((fmt, value))

    def string(self, text: str) -> None:
        self.field("Q", len(text))
        self.field("s", text.encode())

    def bytes(self) -> bytes:
        return b"".join(
            value if fmt == "s" else struct.pack(f"<{fmt}", value & (2 ** (8 * struct.calcsize(fmt)) - 1))
            for fmt, value in self.fields
        )


def gguf_fields(draw: random.Random) -> Gguf:
    """An adapter of one to three pairs, whole and right but for what ``draw`` adds."""
    file = Gguf()
    names = {"blk.0.attn_v.weight": (32, 64), "blk.0.ffn_down.weight": (64, 96), "token_embd.weight": (320, 64)}
    chosen = dict(list(names.items())[: draw.randint(1, 3)])
    strings = {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora"}
    alpha, alignment, tokens = True, draw.random() < 0.2, draw.random() < 0.2
    file.field("s", b"GGUF")
    file.field("I", 3)
    file.field("Q", 2 * len(chosen))
    file.field("Q", len(strings) + alpha + alignment + tokens)
    for key, text in strings.items():
        file.string(key)
        file.field("I", 8)
        file.string(text)
    file.string("adapter.lora.alpha")
    file.field("I", 6)
    file.field("I", 0x41000000)
    if alignment:
        file.string("general.alignment")
        file.field("I", 4)
        file.field("I", 32)
    if tokens:
        file.string("adapter.alora.invocation_tokens")
        for value in (9, 4):
            file.field("I", value)
        file.field("Q", 2)
        for value in (5, 6):
            file.field("I", value)
    offset = 0
    for name, (n_out, n_in) in chosen.items():
        shapes = {"a": (4, n_in), "b": (n_out, 4)}
        if name == "token_embd.weight":
            shapes = {"a": (n_out, 4), "b": (n_in, 4)}
        for half, (rows, columns) in shapes.items():
            file.string(f"{name}.lora_{half}")
            file.field("I", 2)
            file.field("Q", columns)
            file.field("Q", rows)
            file.field("I", 0)
            file.field("Q", offset)
            offset += rows * columns * 4
    file.field("s", bytes(-len(file.bytes()) % 32))
    file.field("s", np.random.default_rng(0).normal(0, 1, offset // 4).astype("<f4").tobytes())
    return file


def test_gguf_adapters_with_wrong_fields_are_refused_or_read(tmp_path, base):
    path = tmp_path / "x.gguf"

    def write(draw: random.Random) -> int:
        file = gguf_fields(draw)
        for _ in range(draw.randint(0, 3)):
            at = draw.randrange(len(file.fields) - 2)
            fmt, value = file.fields[at]
            if fmt == "s":
                mutated = draw.choice([b"", value * 2, b"\xff" + value[1:], b"token_embd.weight.lora_a", b"A" * 300])
                file.fields[at] = (fmt, mutated)
                if draw.random() < 0.7 and at > 0 and file.fields[at - 1][0] == "Q":
                    file.fields[at - 1] = ("Q", len(mutated))
            elif draw.random() < 0.1:
                file.fields.insert(at, file.fields[draw.randrange(len(file.fields) - 2)])
            elif draw.random() < 0.1:
                del file.fields[at]
            else:
                file.fields[at] = (fmt, draw.choice([*EXTREMES, value + 1, value - 1, value * 2, draw.randrange(40)]))
        data = file.bytes()
        return rewrite(path, data[: draw.randrange(len(data))] if draw.random() < 0.05 else data)

    assert set(fuzz("gguf fields", STRUCTURED, path, base, write)) == {"read", "refused"}


ODD_VALUES: list[Any] = [None, True, False, 0, -1, 1, 0.5, -0.0, 1e308, float("nan"), float("inf"), 10**400]
ODD_VALUES += [*EXTREMES, "", "x", "F32", "F64", "\ud800", "\x00", "a" * 5000, [], [[]], [0], [0, 0], [-1, 4]]
ODD_VALUES += [[2**63, 2**63], [1] * 5000, {}, {"a": 1}, [None], ["x"]]


def test_safetensors_with_wrong_headers_are_refused_or_read(tmp_path, base):
    folder = make_peft_folder(tmp_path / "x", random_peft_tensors(SHAPES))
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]

    def write(draw: random.Random) -> int:
        entries = [(name, dict(entry)) for name, entry in header.items()]
        for _ in range(draw.randint(0, 3)):
            at = draw.randrange(len(entries))
            name, entry = entries[at]
            kind = draw.randrange(8)
            if kind == 0:
                entry[draw.choice(["dtype", "shape", "data_offsets"])] = draw.choice(ODD_VALUES)
            elif kind == 1:
                entry["shape"] = [draw.choice([*EXTREMES, 4, 32, 64, 320]) for _ in range(draw.randint(0, 4))]
            elif kind == 2:
                begin, end = header[name]["data_offsets"] if name in header else (0, 0)
                entry["data_offsets"] = [begin + draw.choice([-4, 0, 4]), end + draw.choice([-4, 0, 4])]
            elif kind == 3:
                entries.append((draw.choice([name, name + "x", "", draw.choice(entries)[0]]), entry))
            elif kind == 4:
                entries[at] = (draw.choice([name[:-3], "lora_A.weight", "é\n", "__metadata__", "A" * 400]), entry)
            elif kind == 5:
                entries[at] = (name, draw.choice(ODD_VALUES))
                break
            elif kind == 6:
                entry["dtype"] = draw.choice(["F16", "BF16", "I8", "F8_E4M3"])
            else:
                del entries[at]
                break
        text = "{" + ",".join(f"{json.dumps(name)}:{json.dumps(entry)}" for name, entry in entries) + "}"
        encoded = draw.choice(["", "", "", " ", "[" * 20_000, "{"]).encode() + text.encode() + b" " * draw.randrange(8)
        stated = len(encoded) if draw.random() < 0.9 else draw.choice([*EXTREMES, len(encoded) - 1, len(encoded) + 1])
        return rewrite(weights, struct.pack("<Q", stated) + encoded + data[: draw.choice([None, None, None, -1])])

    assert set(fuzz("safetensors headers", STRUCTURED, folder, base, write)) == {"read", "refused"}


def test_wrong_peft_configurations_are_refused_or_read(tmp_path, base):
    folder = make_peft_folder(tmp_path / "x", random_peft_tensors(SHAPES))
    path = folder / "adapter_config.json"
    whole = path.read_bytes()
    size = (folder / "adapter_model.safetensors").stat().st_size
    keys = [*peft_config(), "layers_to_transform", "layers_pattern", "alora_invocation_tokens", "peft_version"]
    keys += ["target_parameters", "init_lora_weights", "ensure_weight_tying", "use_new_thing", "invocation_string"]
    patterns = ["v_proj", ".*", "(", "a{99999}", "[[a]", r"(v|x)_proj", ".*.*", "(a+)+", "\\", "\x00", "(?P<n>v).*"]

    def write(draw: random.Random) -> int:
        if draw.random() < 0.3:
            return size + rewrite(path, damage(whole, draw, len(whole)))
        config = peft_config()
        for _ in range(draw.randint(0, 3)):
            value = draw.choice(ODD_VALUES)
            if draw.random() < 0.3:
                value = {draw.choice(patterns): draw.choice([8, 8, *ODD_VALUES]) for _ in range(draw.randint(1, 3))}
            elif draw.random() < 0.1:
                value = draw.choice([0, [0], [0, 1], 5, "layers", ["layers"]])
            config[draw.choice(keys)] = value
        return size + rewrite(path, json.dumps(config).encode())

    assert set(fuzz("configurations", 2 * STRUCTURED, folder, base, write)) == {"read", "refused"}


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_modules_in_any_combination_are_refused_or_read(tmp_path, architecture):
    kind = BY_NAME[architecture]
    base = BaseModel.from_gguf(write_model(tmp_path / "x.gguf", kind, gguf_weights(kind, random_weights(kind))))
    shapes = {**module_shapes(kind), **module_shapes(Kind(architecture, fused=not kind.fused))}
    folder = make_peft_folder(tmp_path / "x", {})
    weights = folder / "adapter_model.safetensors"

    def write(draw: random.Random) -> int:
        chosen = {}
        for module in draw.sample(list(shapes), draw.randint(1, 5)):
            n_out, n_in = shapes[module]
            if draw.random() < 0.05:
                n_out = draw.choice([n_in, n_out * 2, n_out // 2, 1, 0])
            if draw.random() < 0.2:
                module = draw.choice([module.removeprefix("model."), f"model.language_model.{module[6:]}", module[:-1]])
            chosen[module] = (n_out, n_in)
        tensors = random_peft_tensors(chosen, ranks={module: draw.choice([1, 2, 3, 3, 3, 5, 0]) for module in chosen})
        rewrite(folder / "adapter_config.json", json.dumps(peft_config(alpha_pattern={"v_proj": 3})).encode())
        return rewrite(weights, safetensors_bytes(tensors, draw.choice(["F32", "F16", "BF16"])))

    assert set(fuzz(f"modules {architecture}", 500, folder, base, write)) == {"read", "refused"}


def test_there_are_at_least_20_000_files():
    assert 4 * BLIND + 4 * STRUCTURED > 20_000
