import argparse
import mmap
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tools_bench
from gguf import GGMLQuantizationType, GGUFReader, LlamaFileType
from gguf.quants import dequantize
from tools_bench import ATTENTION, peft

from gguf_tools import (
    make_gguf_adapter,
    make_peft_folder,
    make_tiny_llama,
    random_peft_tensors,
    tiny_llama_shapes,
)
from keyed_models import EXPERTS, N_EXPERT, make_moe, merged, peft_expert_shapes, random_pairs
from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.gguf_header import read_gguf_header
from loraproxy.adapters.read import read_adapter
from loraproxy.cli import main
from loraproxy.tools import merge as module
from loraproxy.tools.files import ScaledAdapter, adapter_name
from loraproxy.tools.ggml import WRITABLE, decode_rows, encode_rows
from loraproxy.tools.grids import GRIDS
from loraproxy.tools.merge import merge
from loraproxy.tools.progress import Progress
from loraproxy.tools.rounding import Feedback, add_on_grid

F32 = GGMLQuantizationType.F32


@pytest.fixture(scope="module")
def base_path(tmp_path_factory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("base") / "tiny.gguf")


run = partial(tools_bench.run, "merge")


def raw(path: Path) -> dict[str, bytes]:
    data = path.read_bytes()
    header = read_gguf_header(data)
    return {name: data[t.offset : t.offset + t.n_bytes] for name, t in header.tensors.items()}


def values(path: Path) -> dict[str, np.ndarray]:
    return {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(path).tensors}


def deltas(base: BaseModel, *adapters: tuple[Path, float]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for path, scale in adapters:
        for pair in read_adapter("x", path, base).tensors:
            delta = scale * pair.scale * (pair.b @ pair.a)
            found[pair.target] = found.get(pair.target, 0) + (delta.T if pair.op == "get_rows" else delta)
    return found


def test_the_sum_of_several_adapters_at_their_scales_is_added(tmp_path, capsys, base_path):
    one, two = peft(tmp_path / "one"), peft(tmp_path / "two", seed=1, use_rslora=True)
    out = tmp_path / "out.gguf"
    code, said, _ = run(capsys, "-m", base_path, "--adapter", one, "--adapter", f"{two}:-0.5", "-o", out)
    assert code == 0
    assert "4 of 20 tensors merged" in said
    base, found = values(base_path), values(out)
    added = deltas(BaseModel.from_gguf(base_path), (one, 1.0), (two, -0.5))
    for name, value in found.items():
        np.testing.assert_allclose(value, base[name] + added.get(name, 0), atol=1e-5)


def test_untouched_tensors_and_metadata_are_copied_byte_for_byte(tmp_path, base_path):
    folder, out = peft(tmp_path / "x"), tmp_path / "out.gguf"
    merge(base_path, [ScaledAdapter(folder, 0.5)], out)
    before, after = raw(base_path), raw(out)
    assert list(before) == list(after)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {f"blk.{i}.attn_{x}.weight" for i in (0, 1) for x in "qv"}
    old, new = base_path.read_bytes(), out.read_bytes()
    headers = read_gguf_header(old), read_gguf_header(new)
    entries = [
        {key: data[a:b] for key, (a, b) in h.entries.items()} for h, data in zip(headers, (old, new), strict=True)
    ]
    assert headers[1].text("general.name") == "Tiny + x:0.5"
    assert {**entries[0], "general.name": b""} == {**entries[1], "general.name": b""}
    assert list(entries[0]) == list(entries[1])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_every_tensor_keeps_the_type_it_has_in_the_base(tmp_path, kind):
    base_path = make_tiny_llama(tmp_path / "base.gguf", dtype=GGMLQuantizationType[kind])
    result = merge(base_path, [ScaledAdapter(peft(tmp_path / "x", std=0.1), 1.0)], tmp_path / "out.gguf")
    types = [{t.name: t.tensor_type for t in GGUFReader(path).tensors} for path in (base_path, tmp_path / "out.gguf")]
    assert types[0] == types[1]
    assert result.rounding.kept == pytest.approx(1, abs=0.1)
    before, after = raw(base_path), raw(tmp_path / "out.gguf")
    assert before["blk.0.ffn_up.weight"] == after["blk.0.ffn_up.weight"]


def test_an_adapter_far_smaller_than_a_step_survives_four_bits(tmp_path):
    base_path = make_tiny_llama(tmp_path / "base.gguf", n_embd=256, n_ff=256, dtype=GGMLQuantizationType.Q4_0)
    shapes = tiny_llama_shapes(n_embd=256, n_ff=256)
    folder = peft(tmp_path / "x", {name: shapes[name] for name in shapes if "mlp" in name}, std=0.02)
    result = merge(base_path, [ScaledAdapter(folder, 1.0)], tmp_path / "out.gguf")
    added = deltas(BaseModel.from_gguf(base_path), (folder, 1.0))["blk.0.ffn_up.weight"]
    old = values(base_path)["blk.0.ffn_up.weight"]
    nearest = decode_rows(encode_rows(old + added, GGMLQuantizationType.Q4_0), GGMLQuantizationType.Q4_0, 256) - old
    assert (nearest * added).sum() / (added * added).sum() < 0.5, "rounding to the nearest code loses it"
    assert result.rounding.kept > 0.8


def test_what_a_type_of_llama_cpps_quantiser_loses_is_said(tmp_path, capsys):
    base_path = make_tiny_llama(tmp_path / "base.gguf", n_embd=256, n_ff=256, dtype=GGMLQuantizationType.Q4_0)
    shapes = tiny_llama_shapes(n_embd=256, n_ff=256)
    folder = peft(tmp_path / "x", {name: shapes[name] for name in shapes if "mlp" in name}, std=0.02)
    line = ["-m", base_path, "--adapter", folder, "-o", tmp_path / "out.gguf"]
    code, out, _ = run(capsys, *line, "--type", "Q4_0")
    assert code == 0
    assert "note: rounding to Q4_0 leaves" in out
    assert "note" not in run(capsys, *line, "--force", "--type", "Q8_0")[1]
    assert "note" not in run(capsys, *line, "--force")[1]


def test_unsupported_parts_are_refused_or_left_out_as_asked(tmp_path, capsys, base_path):
    line = ["-m", base_path, "--adapter", peft(tmp_path / "x", use_dora=True), "-o", tmp_path / "out.gguf"]
    code, _, err = run(capsys, *line)
    assert code == 1
    assert "DoRA" in err
    code, out, _ = run(capsys, *line, "--ignore-unsupported")
    assert code == 0
    assert "note: DoRA" in out


def test_every_expert_gets_what_its_own_pair_adds(tmp_path, capsys):
    base_path, pairs = make_moe(tmp_path / "base.gguf"), random_pairs(EXPERTS)
    adapter = make_gguf_adapter(tmp_path / "x.gguf", pairs, alpha=8.0)
    out = tmp_path / "out.gguf"
    code, said, _ = run(capsys, "-m", base_path, "--adapter", f"{adapter}:0.5", "-o", out)
    assert code == 0
    assert f"{len(EXPERTS)} of " in said
    base, found, added = values(base_path), values(out), merged(pairs, 0.5 * 8.0 / 4)
    for name, value in found.items():
        np.testing.assert_allclose(value, base[name] + added.get(name, 0), atol=1e-5)
    assert merge(base_path, [ScaledAdapter(adapter, 1.0)], out, LlamaFileType.MOSTLY_Q8_0).rounding.kept > 0.95


def test_experts_that_are_not_adapted_keep_their_bytes_in_eight_bits(tmp_path):
    plain, base_path, out = (tmp_path / f"{name}.gguf" for name in ("plain", "base", "out"))
    attention = make_gguf_adapter(tmp_path / "a.gguf", random_pairs({"blk.0.attn_q.weight": (64, 64)}))
    merge(make_moe(plain), [ScaledAdapter(attention, 1.0)], base_path, LlamaFileType.MOSTLY_Q8_0)
    module = "model.layers.1.block_sparse_moe.experts.2.w1"
    shape = peft_expert_shapes()[module]
    folder = make_peft_folder(tmp_path / "x", random_peft_tensors({module: shape}))
    assert merge(base_path, [ScaledAdapter(folder, 1.0)], out).rounding.kept > 0.9
    before, after = raw(base_path), raw(out)
    (changed,) = (name for name in before if before[name] != after[name])
    assert changed == "blk.1.ffn_gate_exps.weight"
    old, new = (np.frombuffer(data[changed], np.uint8).reshape(N_EXPERT, -1) for data in (before, after))
    assert [not np.array_equal(*bytes_of) for bytes_of in zip(old, new, strict=True)] == [False, False, True, False]


def test_a_head_adapter_of_a_tied_model_becomes_a_head_of_its_own(tmp_path, capsys, base_path):
    folder, out = peft(tmp_path / "x", {"lm_head": (320, 64)}), tmp_path / "out.gguf"
    assert run(capsys, "-m", base_path, "--adapter", folder, "-o", out)[0] == 0
    base, found = values(base_path), values(out)
    added = deltas(BaseModel.from_gguf(base_path), (folder, 1.0))["output.weight"]
    np.testing.assert_array_equal(found["token_embd.weight"], base["token_embd.weight"])
    np.testing.assert_allclose(found["output.weight"], base["token_embd.weight"] + added, atol=1e-5)
    assert not BaseModel.from_gguf(out).tied_output


def test_an_embedding_adapter_of_a_tied_model_leaves_the_head_as_it_was(tmp_path, base_path):
    folder, out = peft(tmp_path / "x", {"model.embed_tokens": (320, 64)}), tmp_path / "out.gguf"
    merge(base_path, [ScaledAdapter(folder, 1.0)], out)
    base, found = values(base_path), values(out)
    added = deltas(BaseModel.from_gguf(base_path), (folder, 1.0))["token_embd.weight"]
    np.testing.assert_array_equal(found["output.weight"], base["token_embd.weight"])
    np.testing.assert_allclose(found["token_embd.weight"], base["token_embd.weight"] + added, atol=1e-5)


def test_an_architecture_that_knows_no_head_refuses_to_be_untied(tmp_path, capsys, base_path):
    tied = make_tiny_llama(tmp_path / "base.gguf", architecture="gemma2")
    folder = peft(tmp_path / "x", {"lm_head": (320, 64)})
    code, _, err = run(capsys, "-m", tied, "--adapter", folder, "-o", tmp_path / "out.gguf")
    assert code == 1
    assert "its embedding is also its output head" in err


def test_a_type_that_needs_an_importance_matrix_is_refused_with_the_way_out(tmp_path, capsys):
    base_path = make_tiny_llama(tmp_path / "base.gguf", n_embd=256, n_ff=256, dtype=GGMLQuantizationType.Q8_0)
    data = bytearray(base_path.read_bytes())
    name = b"blk.0.attn_v.weight"
    at = data.index(name) + len(name) + 4 + 16
    data[at : at + 4] = int(GGMLQuantizationType.IQ2_XXS).to_bytes(4, "little")
    base_path.write_bytes(data)
    shapes = tiny_llama_shapes(n_embd=256, n_ff=256)
    folder = peft(tmp_path / "x", {"model.layers.0.self_attn.v_proj": shapes["model.layers.0.self_attn.v_proj"]})
    code, _, err = run(capsys, "-m", base_path, "--adapter", folder, "-o", tmp_path / "out.gguf")
    assert code == 1
    assert "importance matrix; give another --type" in err


def test_weights_beyond_the_range_of_f16_are_refused(tmp_path, capsys):
    base_path = make_tiny_llama(tmp_path / "base.gguf", dtype=GGMLQuantizationType.F16)
    folder = peft(tmp_path / "x", lora_alpha=10**7)
    code, _, err = run(capsys, "-m", base_path, "--adapter", folder, "-o", tmp_path / "out.gguf")
    assert code == 1
    assert "too large for F16; give --type BF16 or F32" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base.gguf", "x"]


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path, capsys, base_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: argparse.Namespace(free=2 << 20))
    larger = make_tiny_llama(tmp_path / "base.gguf", n_embd=256, n_ff=512)
    shapes = tiny_llama_shapes(n_embd=256, n_ff=512)
    folder = peft(tmp_path / "x", {name: shapes[name] for name in ATTENTION})
    code, _, err = run(capsys, "-m", larger, "--adapter", folder, "-o", tmp_path / "out.gguf")
    assert code == 1
    assert "are needed, the disk has 2.1 MB left" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base.gguf", "x"]


def test_nothing_is_left_behind_when_merging_is_interrupted(tmp_path, capsys, base_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    folder = peft(tmp_path / "x")
    monkeypatch.setattr(module, "quantise", interrupted)
    arguments = ["-m", base_path, "--adapter", folder, "-o", tmp_path / "out.gguf", "--type", "Q8_0"]
    assert run(capsys, *arguments)[0] == 130
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_one_part_of_a_split_model_is_refused_with_the_way_out(tmp_path, capsys, base_path):
    data = base_path.read_bytes()
    key = b"split.count"
    entry = len(key).to_bytes(8, "little") + key + (2).to_bytes(4, "little") + (2).to_bytes(2, "little")
    n_kv = int.from_bytes(data[16:24], "little") + 1
    start, old = 24, read_gguf_header(data)
    end = max(stop for _, stop in old.entries.values())
    first = min(tensor.offset for tensor in old.tensors.values())
    head = data[:16] + n_kv.to_bytes(8, "little") + entry + data[start:end]
    infos = data[end:first].rstrip(b"\0")
    padded = (head + data[end:first])[: len(head) + len(infos) + 32]
    part = tmp_path / "part-00001-of-00002.gguf"
    part.write_bytes(padded.ljust(-(-len(padded) // 32) * 32 + 32, b"\0") + data[first:])
    shutil.copy(part, tmp_path / "part-00002-of-00002.gguf")
    code, _, err = run(capsys, "-m", part, "--adapter", peft(tmp_path / "x"), "-o", tmp_path / "out.gguf")
    assert code == 1
    assert "llama-gguf-split --merge" in err


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (("--adapter", "x:half"), 2, "the scale 'half' of x is not a number"),
        (("--adapter", "x:nan"), 2, "must be a finite number other than 0"),
        (("--adapter", "x:0"), 2, "must be a finite number other than 0"),
        (("--adapter", ""), 2, "PATH or PATH:SCALE"),
        (("--adapter", "none:0.5"), 1, "none: no such file or folder"),
        (("--adapter", "x", "--type", "Q9"), 2, "invalid choice"),
        ((), 2, "--adapter"),
    ],
)
def test_errors_are_one_clear_line(tmp_path, capsys, base_path, monkeypatch, arguments, code, reason):
    peft(tmp_path / "x")
    monkeypatch.chdir(tmp_path)
    line = ["merge", "-m", str(base_path), "-o", "out.gguf", *arguments]
    try:
        found = main(line)
    except SystemExit as end:
        found = end.code
    err = capsys.readouterr().err
    assert found == code
    assert reason in err
    assert err.count("\n") == 1


def test_a_path_with_colons_is_taken_whole_where_it_exists(tmp_path):
    folder = tmp_path / "a:0.5"
    assert ScaledAdapter.parse(str(folder)) == ScaledAdapter(tmp_path / "a", 0.5)
    folder.mkdir()
    assert ScaledAdapter.parse(str(folder)) == ScaledAdapter(folder, 1.0)
    assert ScaledAdapter.parse(f"{folder}:-2") == ScaledAdapter(folder, -2.0)
    assert ScaledAdapter.parse("b:c") == ScaledAdapter(Path("b:c"), 1.0)


def test_an_adapters_name_comes_from_its_file():
    assert adapter_name(Path("a/my adapter.gguf")) == "my-adapter"
    assert adapter_name(Path("a/pirate.v2")) == "pirate.v2"
    assert adapter_name(Path("a/None")) == "adapter-None"
    assert adapter_name(Path("a/…")) == "adapter"


# -- ggml's types --------------------------------------------------------------------------------------------


SLOW_TO_BEGIN = {GGMLQuantizationType.IQ1_M, GGMLQuantizationType.IQ2_S}
"""Types for which ggml builds tables for many seconds."""


@pytest.mark.parametrize("kind", sorted(WRITABLE - SLOW_TO_BEGIN), ids=lambda kind: kind.name)
def test_ggml_reads_what_it_writes_as_the_gguf_package_does(kind):
    values = np.random.default_rng(0).normal(0, 1, (8, 512)).astype(np.float32)
    written = encode_rows(values, kind)
    found = decode_rows(written, kind, 512)
    assert found.shape == values.shape
    if kind.name != "Q1_0":  # which some releases of the package cannot read
        np.testing.assert_allclose(found, dequantize(written.reshape(8, -1), kind), rtol=1e-6)


@pytest.mark.parametrize("kind", sorted(GRIDS), ids=lambda kind: kind.name)
def test_moving_a_code_moves_its_weight_by_a_step_and_no_other(kind):
    random = np.random.default_rng(0)
    raw_rows = encode_rows(random.normal(0, 1, (8, 512)).astype(np.float32), kind)
    grid = GRIDS[kind]
    codes = grid.codes(raw_rows, 512)
    np.testing.assert_array_equal(grid.with_codes(raw_rows, codes), raw_rows)
    moved = np.clip(codes + random.integers(-1, 2, codes.shape), 0, grid.highest).astype(np.int32)
    after = grid.with_codes(raw_rows, moved)
    difference = decode_rows(after, kind, 512) - decode_rows(raw_rows, kind, 512)
    np.testing.assert_allclose(difference, (moved - codes) * grid.steps(raw_rows, 512), atol=1e-5)


@pytest.mark.parametrize("kind", sorted(GRIDS), ids=lambda kind: kind.name)
def test_a_small_sum_comes_out_right_on_the_inputs_that_count(kind):
    random = np.random.default_rng(0)
    raw_rows = encode_rows(random.normal(0, 1, (64, 512)).astype(np.float32), kind)
    a = random.normal(0, 1, (4, 512)).astype(np.float32)
    step = np.abs(GRIDS[kind].steps(raw_rows, 512)).mean()
    delta = (0.05 * step * random.normal(0, 1, (64, 4)) @ a).astype(np.float32)
    written = add_on_grid(GRIDS[kind], raw_rows, delta, Feedback(a))
    moved = decode_rows(written, kind, 512) - decode_rows(raw_rows, kind, 512)
    assert np.linalg.norm((moved - delta) @ a.T) < 0.3 * np.linalg.norm(delta @ a.T)


def test_the_progress_line_is_for_terminals_alone(capsys):
    class Terminal:
        def __init__(self, is_terminal: bool) -> None:
            self.is_terminal = is_terminal
            self.text = ""

        def isatty(self) -> bool:
            return self.is_terminal

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            pass

    for is_terminal in (False, True):
        stream = Terminal(is_terminal)
        with Progress("merging", 200, stream) as progress:
            progress.advance(100, "blk.0")
        assert ("50 % blk.0" in stream.text) is is_terminal
        assert stream.text.endswith("\r\x1b[K") is is_terminal


def test_memory_holds_a_few_rows_and_not_the_model(tmp_path, base_path):
    with base_path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as source:
        tensor = read_gguf_header(source).tensors["token_embd.weight"]
        whole = module.gguf_copy.copied(source, tensor)
        assert whole.n_bytes == tensor.n_bytes
        assert b"".join(whole.data()) == raw(base_path)["token_embd.weight"]


def test_the_bases_own_file_type_is_as_no_type(tmp_path):
    base_path = make_tiny_llama(tmp_path / "base.gguf")
    folder = peft(tmp_path / "x")
    merge(base_path, [ScaledAdapter(folder, 1.0)], tmp_path / "a.gguf")
    merge(base_path, [ScaledAdapter(folder, 1.0)], tmp_path / "b.gguf", LlamaFileType.ALL_F32)
    assert raw(tmp_path / "a.gguf") == raw(tmp_path / "b.gguf")
