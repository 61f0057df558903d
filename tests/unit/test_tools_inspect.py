import json
import random
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tools_bench
from tools_bench import ATTENTION, peft

from gguf_tools import (
    make_gguf_adapter,
    make_peft_folder,
    peft_config,
    random_peft_tensors,
    tiny_llama_shapes,
)
from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.read import read_adapter
from loraproxy.errors import InvalidAdapterFile
from loraproxy.tools.describe import alike, grouped_targets, spread
from loraproxy.tools.inspect import inspect, lines
from servers import demo_adapters

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


run = partial(tools_bench.run, "inspect")


def test_the_wizard_is_shown_with_rslora_and_its_effective_scale(capsys):
    code, out, _ = run(capsys, demo_adapters()["wizard"])
    assert code == 0
    assert "2.83 = 8 / sqrt(8) (rsLoRA)" in out
    assert "down_proj, gate_proj, up_proj in layers 0-29 (90 pairs)" in out
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in out


def test_an_adapter_that_fits_is_shown_with_its_tensors_and_memory(tmp_path, capsys, base):
    code, out, _ = run(capsys, peft(tmp_path / "x"), "--model", base.path)
    assert code == 0
    assert "attn_q, attn_v in layers 0-1" in out
    assert "fits      llama model 'Tiny'" in out
    assert read_adapter("x", tmp_path / "x", base).digest in out


def test_the_digest_and_memory_are_the_servers_with_and_without_a_model(tmp_path, base):
    adapter = read_adapter("x", peft(tmp_path / "x"), base)
    for report in (inspect(tmp_path / "x"), inspect(tmp_path / "x", base)):
        assert report.facts["digest"] == adapter.digest
        assert report.facts["resident_bytes"] == adapter.summary.resident_bytes
        assert report.facts["size_bytes"] == adapter.size_bytes


def test_a_gguf_adapter_is_shown_with_its_alpha_and_architecture(tmp_path, capsys):
    tensors = {
        "blk.0.attn_v.weight.lora_a": np.ones((4, 64), np.float32),
        "blk.0.attn_v.weight.lora_b": np.ones((32, 4), np.float32),
    }
    code, out, _ = run(capsys, make_gguf_adapter(tmp_path / "x.gguf", tensors, alpha=6.0))
    assert code == 0
    assert "GGUF LoRA adapter" in out
    assert "1.5 = 6 / 4" in out
    assert "attn_v in layer 0" in out
    assert "llama" in out


def test_json_holds_the_same_for_machines(tmp_path, capsys, base):
    code, out, _ = run(capsys, peft(tmp_path / "x", use_rslora=True), "--model", base.path, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["usable"] is True
    assert report["facts"]["rslora"] is True
    assert report["facts"]["scale_range"] == [4.0, 4.0]
    assert report["facts"]["model"]["fits"] is True


def test_every_problem_is_listed_and_what_could_be_loaded_without(tmp_path, capsys, base):
    tensors = random_peft_tensors(ATTENTION)
    tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"] = np.ones(64, np.float32)
    tensors["base_model.model.model.layers.0.self_attn.q_proj.bias"] = np.ones(64, np.float32)
    folder = make_peft_folder(tmp_path / "x", tensors, peft_config(use_dora=True, alora_invocation_tokens=[5, 6]))
    for arguments in ((), ("--model", base.path)):
        code, out, _ = run(capsys, folder, *arguments)
        assert code == 1
        assert "would be refused" in out
        assert "DoRA (use_dora)" in out
        assert "bias" in out
        assert "invocation tokens" in out
        assert "starts at the tokens [5, 6]" in out
    assert "--ignore-unsupported would load 4 pairs" in out


def test_several_wrong_keys_of_a_configuration_are_all_named(tmp_path, capsys):
    folder = peft(tmp_path / "x", lora_alpha="eight", use_qalora=True, use_rslora="yes", r=-1)
    code, out, _ = run(capsys, folder)
    assert code == 1
    for key in ("lora_alpha", "use_qalora", "use_rslora", " r must"):
        assert key in out, key


def test_another_models_shapes_are_refused_in_one_line_for_all_layers(tmp_path, capsys, base):
    shapes = tiny_llama_shapes(n_embd=128)
    folder = peft(tmp_path / "x", {name: shapes[name] for name in shapes if name.endswith("v_proj")})
    code, out, _ = run(capsys, folder, "--model", base.path)
    assert code == 1
    assert "layers.0.self_attn.v_proj has the wrong shape" in out or "blk.0.attn_v.weight has the wrong shape" in out
    assert "more like it, of other layers" in out


def test_weights_that_are_no_numbers_are_found_without_a_model(tmp_path, capsys):
    tensors = random_peft_tensors(ATTENTION)
    next(iter(tensors.values()))[0, 0] = np.nan
    code, out, _ = run(capsys, make_peft_folder(tmp_path / "x", tensors))
    assert code == 1
    assert "NaN or infinite weights" in out


def test_layers_that_are_not_transformed_are_left_out_with_a_note(tmp_path, capsys, base):
    for arguments in ((), ("--model", base.path)):
        code, out, _ = run(capsys, peft(tmp_path / "x", layers_to_transform=[1]), *arguments)
        assert code == 0
        assert "q_proj, v_proj in layer 1 (2 pairs)" in out
        assert out.count("layers_to_transform") == 1


def test_pickled_weights_are_refused_with_the_way_out(tmp_path, capsys):
    (peft(tmp_path / "x") / "adapter_model.safetensors").rename(tmp_path / "x" / "adapter_model.bin")
    code, out, _ = run(capsys, tmp_path / "x")
    assert code == 1
    assert "safe_serialization=True" in out


def lacking_a_half(folder: Path) -> None:
    tensors = random_peft_tensors(ATTENTION)
    tensors.pop(next(iter(tensors)))
    make_peft_folder(folder, tensors)


DAMAGE = {
    "no configuration": (lambda x: (x / CONFIG).unlink(), "the folder has no adapter_config.json"),
    "no JSON": (lambda x: (x / CONFIG).write_text("{"), "adapter_config.json is not JSON"),
    "no weights": (lambda x: (x / WEIGHTS).unlink(), "the folder has no adapter_model.safetensors"),
    "half a pair": (lacking_a_half, "half of a pair is missing"),
    "DoRA": (lambda x: peft(x, use_dora=True), "DoRA (use_dora), which changes"),
    "alpha 0": (lambda x: peft(x, lora_alpha=0), "lora_alpha must be a finite number other than 0"),
    "pickled": (lambda x: (x / WEIGHTS).rename(x / "adapter_model.bin"), "the weights are pickled"),
    "PiSSA": (lambda x: peft(x, init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("beside", ["alone", "with its model"])
def test_one_fault_is_one_reason(tmp_path, base, damage, reason, beside):
    damage(peft(tmp_path / "x"))
    (problem,) = inspect(tmp_path / "x", base if beside == "with its model" else None).problems
    assert reason in problem


def test_a_scale_that_the_configuration_does_not_tell_is_unknown(tmp_path):
    assert inspect(peft(tmp_path / "x", lora_alpha="eight")).facts["scale"] == "unknown"


def test_what_an_initialisation_means_is_a_note_with_and_without_a_model(tmp_path, base):
    folder = peft(tmp_path / "x", init_lora_weights="loftq")
    for report in (inspect(folder), inspect(folder, base)):
        assert report.usable
        assert sum(note.startswith("LoftQ") for note in report.notes) == 1


def test_a_base_model_is_called_so(capsys, base):
    code, out, _ = run(capsys, base.path)
    assert code == 0
    assert "base model" in out
    assert "2 layers" in out
    assert "the token embedding" in out


def test_a_folder_of_adapters_names_them(tmp_path, capsys):
    peft(tmp_path / "one")
    code, out, _ = run(capsys, tmp_path)
    assert code == 1
    assert "it contains one: name one" in out


@pytest.mark.parametrize("content", [b"", b"GGUF", b"hello", b"GGUF" + bytes(2000)])
def test_files_that_are_neither_are_called_so(tmp_path, capsys, content):
    (tmp_path / "x").write_bytes(content)
    code, out, err = run(capsys, tmp_path / "x")
    assert code == 1
    assert "no adapter" in out
    assert err == ""


def test_a_missing_file_and_a_missing_model_are_wrong_usage(tmp_path, capsys, base):
    assert run(capsys, tmp_path / "none") == (2, "", f"error: {tmp_path / 'none'}: no such file or folder\n")
    code, _, err = run(capsys, peft(tmp_path / "x"), "--model", tmp_path / "x" / "adapter_config.json")
    assert code == 2
    assert "not a GGUF file" in err


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path, capsys):
    code, out, _ = run(capsys, peft(tmp_path / "x", base_model_name_or_path="\x1b[2Jevil"))
    assert code == 0
    assert "\x1b" not in out
    assert "evil" in out


def test_targets_are_grouped_by_their_layers():
    names = [f"model.layers.{i}.self_attn.{leaf}" for i in (0, 1, 2, 5) for leaf in ("q_proj", "v_proj")]
    assert grouped_targets([*names, "lm_head"]) == "q_proj, v_proj in layers 0-2, 5; lm_head"
    assert grouped_targets(["blk.3.attn_q.weight", "output.weight"]) == "attn_q in layer 3; output"


def test_numbers_and_messages_that_are_alike_are_counted():
    assert spread([8, 8, 16]) == "8 (2 times), 16 (1 times)"
    assert alike(["blk.0.x is bad", "blk.1.x is bad", "y"]) == [
        "blk.0.x is bad (and 1 more like it, of other layers)",
        "y",
    ]


# -- hostile files -------------------------------------------------------------------------------------------


def damaged(data: bytes, draw: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(found))
        kind = draw.randrange(4)
        if kind == 0:
            found[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            found[at : at + 8] = struct.pack("<Q", draw.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
        elif kind == 2:
            found[at:at] = draw.randbytes(draw.randint(1, 16))
        elif len(found) > 64:
            del found[at + 1 : at + draw.randint(2, 64)]
    return bytes(found)


def check(path: Path, base: BaseModel) -> None:
    """Inspect a file; with the model, the verdict must be the server's."""
    alone, report = inspect(path), inspect(path, base)
    for found in (alone, report):
        json.dumps(vars(found))
        assert all(lines(found))
        assert found.usable != bool(found.problems)
    try:
        read_adapter("x", path, base)
    except InvalidAdapterFile:
        assert not report.usable or report.kind == "base model"
    else:
        assert report.usable


def test_damaged_gguf_files_are_described_and_never_crash(tmp_path, base):
    tensors = {
        "blk.0.attn_v.weight.lora_a": np.ones((4, 64), np.float32),
        "blk.0.attn_v.weight.lora_b": np.ones((32, 4), np.float32),
    }
    path = make_gguf_adapter(tmp_path / "x.gguf", tensors)
    whole = path.read_bytes()
    for number in range(150):
        path.write_bytes(damaged(whole[:900], random.Random(number)) + whole[900:])
        check(path, base)


def test_damaged_peft_folders_are_described_and_never_crash(tmp_path, base):
    folder = peft(tmp_path / "x", alpha_pattern={"v_proj": 3}, alora_invocation_tokens=None)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        path = folder / name
        whole = path.read_bytes()
        for number in range(100):
            path.write_bytes(damaged(whole[:1500], random.Random(number)) + whole[1500:])
            check(folder, base)
        path.write_bytes(whole)


def test_odd_values_in_a_configuration_are_described_and_never_crash(tmp_path, base):
    values = [None, True, 0, -1, 10**400, float("nan"), "", "a" * 5000, "\ud800", [], [[]], {}, {"(": 1}, {"a": {}}]
    folder = peft(tmp_path / "x")
    keys = [*peft_config(), "layers_to_transform", "alora_invocation_tokens", "peft_version", "init_lora_weights"]
    for key in keys:
        for value in values:
            (folder / "adapter_config.json").write_text(json.dumps(peft_config(**{key: value})))
            check(folder, base)
