from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tools_bench
from tools_bench import SHAPES, peft

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.read import Unsupported, read_adapter
from loraproxy.adapters.tensors import LoraTensor, Op
from loraproxy.tools import convert as module
from loraproxy.tools.convert import convert, relative_error

run = partial(tools_bench.run, "convert")


def effective(path: Path, base: BaseModel) -> dict[str, np.ndarray]:
    return {pair.target: pair.scale * pair.b @ pair.a for pair in read_adapter("x", path, base).tensors}


def test_scaling_is_folded_in_whatever_it_comes_from(tmp_path, capsys, base):
    folder = peft(tmp_path / "x", use_rslora=True, alpha_pattern={"v_proj": 3})
    code, out, _ = run(capsys, folder, tmp_path / "x.gguf", "--model", base.path, "--outtype", "f32")
    assert code == 0
    assert "4 pairs as f32, scaling folded in; read back, the largest relative error is" in out
    assert "rsLoRA: scale = 3 / sqrt(4) = 1.5" in out
    expected, written = effective(folder, base), effective(tmp_path / "x.gguf", base)
    for target, delta in expected.items():
        np.testing.assert_allclose(written[target], delta, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("outtype", "error"), [("f32", 1e-6), ("f16", 1e-3), ("bf16", 1e-2), ("q8_0", 2e-2)])
def test_the_error_said_is_that_of_the_file(tmp_path, base, outtype, error):
    result = convert(peft(tmp_path / "x"), tmp_path / "x.gguf", base.path, outtype)
    expected, written = effective(tmp_path / "x", base), effective(tmp_path / "x.gguf", base)
    norms = [np.linalg.norm(written[t] - expected[t]) / np.linalg.norm(expected[t]) for t in expected]
    assert result.error == pytest.approx(max(norms), rel=0.05, abs=1e-6)
    assert result.error < error


def test_a_gguf_adapter_is_encoded_anew(tmp_path, capsys, base):
    convert(peft(tmp_path / "x"), tmp_path / "a.gguf", base.path, "f32")
    code, out, _ = run(capsys, tmp_path / "a.gguf", tmp_path / "b.gguf", "-m", base.path, "--outtype", "F16")
    assert code == 0
    assert "as f16" in out
    assert (tmp_path / "b.gguf").stat().st_size < (tmp_path / "a.gguf").stat().st_size


def test_a_file_that_exists_is_replaced_only_by_force(tmp_path, capsys, base):
    folder, out = peft(tmp_path / "x"), tmp_path / "x.gguf"
    out.write_text("precious")
    code, _, err = run(capsys, folder, out, "-m", base.path)
    assert (code, err) == (1, f"error: {out} exists; give --force to replace it\n")
    assert out.read_text() == "precious"
    assert run(capsys, folder, out, "-m", base.path, "--force")[0] == 0
    assert out.read_bytes()[:4] == b"GGUF"


def test_what_is_read_is_never_overwritten(tmp_path, capsys, base):
    convert(peft(tmp_path / "x"), tmp_path / "a.gguf", base.path)
    code, _, err = run(capsys, tmp_path / "a.gguf", tmp_path / "a.gguf", "-m", base.path, "--force")
    assert code == 1
    assert "is also read" in err


def test_an_adapter_of_a_tied_embedding_is_refused_with_the_reason(tmp_path, capsys, base):
    folder = peft(tmp_path / "x", {"model.embed_tokens": SHAPES["model.embed_tokens"]})
    code, _, err = run(capsys, folder, tmp_path / "x.gguf", "-m", base.path)
    assert code == 1
    assert "shares one tensor between embedding and output head" in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_unsupported_parts_are_refused_or_left_out_as_asked(tmp_path, capsys, base):
    folder = peft(tmp_path / "x", use_dora=True)
    code, _, err = run(capsys, folder, tmp_path / "x.gguf", "-m", base.path)
    assert code == 1
    assert "DoRA" in err
    code, out, _ = run(capsys, folder, tmp_path / "x.gguf", "-m", base.path, "--ignore-unsupported")
    assert code == 0
    assert "note: DoRA" in out


def test_invocation_tokens_of_an_activated_lora_are_kept_in_the_file(tmp_path, base):
    folder = peft(tmp_path / "x", alora_invocation_tokens=[7, 8])
    convert(folder, tmp_path / "x.gguf", base.path, unsupported=Unsupported.LEAVE_OUT)
    written = read_adapter("x", tmp_path / "x.gguf", base, unsupported=Unsupported.LEAVE_OUT)
    assert written.invocation_tokens == (7, 8)
    assert written.base_name == "someone/tiny-llama"


def test_nothing_is_left_behind_when_checking_is_interrupted(tmp_path, capsys, base, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    folder = peft(tmp_path / "x")
    monkeypatch.setattr(module, "_worst", interrupted)
    assert run(capsys, folder, tmp_path / "x.gguf", "-m", base.path)[0] == 130
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("none", "x.gguf", "-m", "BASE"), "none: no such file or folder"),
        (("x", "x.gguf", "-m", "none"), "none: no such file or folder"),
        (("x", "no/x.gguf", "-m", "BASE"), "does not exist"),
        (("x", "x", "-m", "BASE"), "is a folder"),
        (("x", "x.gguf", "-m", "x/adapter_config.json"), "not a GGUF file"),
    ],
)
def test_errors_are_one_clear_line(tmp_path, capsys, base, monkeypatch, arguments, reason):
    peft(tmp_path / "x")
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *(base.path if word == "BASE" else word for word in arguments))
    assert (code, out) == (1, "")
    assert reason in err
    assert err.count("\n") == 1


def test_the_relative_error_is_that_of_the_products():
    random = np.random.default_rng(0)
    a, b = random.normal(0, 1, (4, 30)).astype(np.float32), random.normal(0, 1, (20, 4)).astype(np.float32)
    pair = LoraTensor("x", Op.MUL_MAT, a, b, 2.0)
    assert relative_error(pair, replace(pair, b=2 * b, scale=1.0)) < 1e-7
    assert relative_error(pair, replace(pair, b=1.01 * b)) == pytest.approx(0.01, rel=1e-3)
    assert relative_error(pair, replace(pair, a=a[::-1], b=b[:, ::-1])) < 1e-7
    nothing = replace(pair, b=0 * b)
    assert relative_error(nothing, nothing) == 0
    assert relative_error(nothing, pair) == np.inf
