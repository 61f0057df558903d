"""What cannot be applied is refused with the reason, the tensors and the way out, each in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_tools import (
    make_gguf_adapter,
    make_peft_folder,
    make_tiny_llama,
    peft_config,
    random_peft_tensors,
    tiny_llama_shapes,
)
from loraproxy.adapters.read import Unsupported, read_adapter, survey_adapter
from loraproxy.errors import InvalidAdapterFile

SHAPES = tiny_llama_shapes()
V = "model.layers.0.self_attn.v_proj"
PREFIX = "base_model.model."
Tensors = dict[str, np.ndarray[Any, Any]]
Make = Callable[[Path], Path]
ALWAYS, UNLESS_LEFT_OUT = "always", "unless left out"
HINT = "; --ignore-unsupported loads the rest"
NEVERTHELESS = "; --ignore-unsupported loads it nevertheless"
PLAIN = "train a plain LoRA, or merge the adapter into the base model"
MADE_FOR = " (its adapter_config.json names the base 'someone/tiny-llama')"


def peft(config: dict[str, Any] | None = None, **changes: Any) -> Make:
    """A PEFT folder of one pair, V's, with other entries in its configuration and other tensors (None: without)."""

    def make(path: Path) -> Path:
        tensors = random_peft_tensors({V: SHAPES[V]})
        for name, values in changes.items():
            full = PREFIX + name
            if values is None:
                del tensors[full]
            else:
                tensors[full] = np.asarray(values, np.float32)
        return make_peft_folder(path, tensors, peft_config(**config or {}))

    return make


def pickled(path: Path) -> Path:
    peft()(path)
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    return path


def shortened(path: Path) -> Path:
    weights = peft()(path) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return path


def gguf(tensors: Tensors | None = None, **settings: Any) -> Make:
    """A GGUF adapter of one pair, that of attn_v, with other tensors and metadata."""
    pair = {"blk.0.attn_v.weight.lora_a": np.ones((4, 64), np.float32)}
    pair["blk.0.attn_v.weight.lora_b"] = np.ones((32, 4), np.float32)
    return lambda path: make_gguf_adapter(path, pair | (tensors or {}), **settings)


ZEROS = np.zeros((4, 64), np.float32)
REFUSALS: dict[str, tuple[Make, str, str]] = {
    "DoRA by its tensors": (
        peft({"use_dora": True}, **{f"{V}.lora_magnitude_vector": np.ones(32)}),
        UNLESS_LEFT_OUT,
        "DoRA (use_dora), which changes the weights' magnitudes, is not supported "
        f"({PREFIX}{V}.lora_magnitude_vector): {PLAIN}{HINT}",
    ),
    "DoRA by its configuration": (
        peft({"use_dora": True}),
        UNLESS_LEFT_OUT,
        f"DoRA (use_dora), which changes the weights' magnitudes, is not supported: {PLAIN}{HINT}",
    ),
    "a trained bias": (
        peft({"bias": "lora_only"}, **{f"{V}.base_layer.bias": np.ones(32), f"{V}.lora_B.bias": np.ones(32)}),
        UNLESS_LEFT_OUT,
        "a trained bias (bias, lora_bias) is not supported "
        f"({PREFIX}{V}.base_layer.bias, {PREFIX}{V}.lora_B.bias): {PLAIN}{HINT}",
    ),
    "modules_to_save": (
        peft({"modules_to_save": ["lm_head"]}, **{"lm_head.weight": np.ones((320, 64))}),
        UNLESS_LEFT_OUT,
        "replacing whole weights (modules_to_save, or a resized vocabulary) is not supported "
        f"({PREFIX}lm_head.weight): {PLAIN}{HINT}",
    ),
    "trainable tokens": (
        peft(
            {"trainable_token_indices": [5]},
            **{"model.embed_tokens.token_adapter.trainable_tokens_delta": np.ones((1, 64))},
        ),
        UNLESS_LEFT_OUT,
        "replacing rows of the embedding (trainable_token_indices) is not supported "
        f"({PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta): {PLAIN}{HINT}",
    ),
    "activated LoRA in PEFT": (
        peft({"alora_invocation_tokens": [5, 6]}),
        UNLESS_LEFT_OUT,
        "activated LoRA (alora_invocation_tokens), which starts in the middle of a prompt, is not supported: "
        f"{PLAIN}{NEVERTHELESS}",
    ),
    "activated LoRA in GGUF": (
        gguf(invocation_tokens=[5, 6]),
        UNLESS_LEFT_OUT,
        "activated LoRA (adapter.alora.invocation_tokens), which starts in the middle of a prompt, is not supported: "
        f"{PLAIN}{NEVERTHELESS}",
    ),
    "some modules that the base lacks": (
        peft(**{f"vision.{half}.weight": values for half, values in (("lora_A", ZEROS), ("lora_B", ZEROS.T))}),
        UNLESS_LEFT_OUT,
        "modules that the llama model 'Tiny' does not have (vision): use an adapter that was trained for this base "
        f"model{HINT}{MADE_FOR}",
    ),
    "tensors of an unknown kind": (
        peft(**{f"{V}.lora_C.weight": ZEROS}),
        UNLESS_LEFT_OUT,
        f"tensors that belong to no plain LoRA ({PREFIX}{V}.lora_C.weight): {PLAIN}{HINT}",
    ),
    "tensors of an unknown kind in GGUF": (
        gguf({"blk.0.attn_v.bias": np.ones(32, np.float32)}),
        UNLESS_LEFT_OUT,
        f"tensors that are neither lora_a nor lora_b, and so no plain LoRA (blk.0.attn_v.bias): {PLAIN}{HINT}",
    ),
    "a pickled file": (
        pickled,
        ALWAYS,
        "the weights are pickled (adapter_model.bin), and unpickling can run code; load the adapter with PEFT "
        "and save it with save_pretrained(..., safe_serialization=True)",
    ),
    "another base's shapes": (
        peft(**{f"{V}.lora_A.weight": np.ones((4, 128)), f"{V}.lora_B.weight": np.ones((128, 4))}),
        ALWAYS,
        "tensor blk.0.attn_v.weight has the wrong shape: A (4, 128), B (128, 4); the llama model 'Tiny' needs "
        f"A (4, 64), B (32, 4); the adapter is for another model{MADE_FOR}",
    ),
    "another base's modules": (
        lambda path: make_peft_folder(path, random_peft_tensors({"transformer.h.0.attn.c_attn": (192, 64)})),
        ALWAYS,
        "modules that the llama model 'Tiny' does not have: transformer.h.0.attn.c_attn; "
        f"use an adapter that was trained for this base model{MADE_FOR}",
    ),
    "another architecture": (
        gguf(architecture="qwen2"),
        ALWAYS,
        "the adapter is for the architecture 'qwen2', the base model is a llama model 'Tiny'; "
        "use an adapter trained for this base model",
    ),
    "NaN": (
        peft(**{f"{V}.lora_A.weight": np.full((4, 64), np.nan)}),
        ALWAYS,
        "tensor blk.0.attn_v.weight holds NaN or infinite weights; the adapter is damaged",
    ),
    "infinities": (
        gguf({"blk.0.attn_v.weight.lora_b": np.full((32, 4), -np.inf, np.float32)}),
        ALWAYS,
        "tensor blk.0.attn_v.weight holds NaN or infinite weights; the adapter is damaged",
    ),
    "an empty adapter": (
        lambda path: make_peft_folder(path, {}),
        ALWAYS,
        f"adapter_model.safetensors holds no lora_A/lora_B tensors{MADE_FOR}",
    ),
    "an empty GGUF adapter": (
        lambda path: make_gguf_adapter(path, {}),
        ALWAYS,
        "the file holds no lora_a/lora_b tensors",
    ),
    "half a pair": (
        peft(**{f"{V}.lora_B.weight": None}),
        ALWAYS,
        f"half of a pair is missing: {V}.lora_B; save the adapter again{MADE_FOR}",
    ),
    "a truncated file": (
        shortened,
        ALWAYS,
        "adapter_model.safetensors has 1692 bytes where its header needs 1792: it is truncated or damaged",
    ),
    "LoHa": (
        peft({"peft_type": "LOHA"}),
        ALWAYS,
        f"peft_type is 'LOHA'; only 'LORA' is supported: {PLAIN}",
    ),
    "IA3": (peft({"peft_type": "IA3"}), ALWAYS, f"peft_type is 'IA3'; only 'LORA' is supported: {PLAIN}"),
    "VeRA": (peft({"peft_type": "VERA"}), ALWAYS, f"peft_type is 'VERA'; only 'LORA' is supported: {PLAIN}"),
    "a variant that is not known": (
        peft({"use_shinylora": True}),
        ALWAYS,
        f"'use_shinylora' is set, a variant of LoRA that is not known here: {PLAIN}",
    ),
    "QALoRA": (
        peft({"use_qalora": True}),
        ALWAYS,
        f"QALoRA (use_qalora) pools its inputs, which is not supported: {PLAIN}",
    ),
    "PiSSA": (
        peft({"init_lora_weights": "PiSSA"}),
        UNLESS_LEFT_OUT,
        "init_lora_weights is 'PiSSA': the adapter belongs to a changed base model, from which PEFT took what the "
        "adapter began with: save it again with PEFT's path_initial_model_for_weight_conversion, which makes it a "
        f"plain LoRA{NEVERTHELESS}",
    ),
    "repeated layers": (
        peft({"layer_replication": [[0, 2], [1, 2]]}),
        ALWAYS,
        f"layer_replication changes the base model's layers, which is not supported: {PLAIN}",
    ),
    "a resized vocabulary": (
        peft(**{"model.embed_tokens.base_layer.weight": np.zeros((330, 64))}),
        ALWAYS,
        "model.embed_tokens.base_layer.weight has shape (330, 64), the base model's has (320, 64): the vocabulary was "
        "resized for training; use the base model with that vocabulary",
    ),
    "a model instead of an adapter": (
        lambda path: make_tiny_llama(path),
        ALWAYS,
        "the file is a model, not an adapter (general.type is 'model', it must be 'adapter')",
    ),
}


def reason(read: Callable[[], object], path: Path) -> str:
    with pytest.raises(InvalidAdapterFile) as caught:
        read()
    assert caught.value.status == 400
    prefix = f"adapter 'x' ({path}): "
    assert caught.value.message.startswith(prefix)
    return caught.value.message.removeprefix(prefix)


@pytest.mark.parametrize(("make", "when", "message"), REFUSALS.values(), ids=REFUSALS)
def test_it_is_refused_with_the_reason_and_the_way_out(tmp_path, base, make, when, message):
    path = make(tmp_path / "x")
    assert reason(lambda: read_adapter("x", path, base), path) == message
    if "NaN" not in message:
        assert reason(lambda: survey_adapter("x", path, base), path) == message
    if when == ALWAYS:
        assert reason(lambda: read_adapter("x", path, base, unsupported=Unsupported.LEAVE_OUT), path) == message


LEAVABLE = {name: entry for name, entry in REFUSALS.items() if entry[1] == UNLESS_LEFT_OUT}


@pytest.mark.parametrize(("make", "when", "message"), LEAVABLE.values(), ids=LEAVABLE)
def test_what_may_be_left_out_is_named_and_the_rest_is_read(tmp_path, base, make, when, message):
    path = make(tmp_path / "x")
    adapter = read_adapter("x", path, base, unsupported=Unsupported.LEAVE_OUT)
    assert [tensor.target for tensor in adapter.tensors] == ["blk.0.attn_v.weight"]
    (sentence,) = adapter.left_out
    assert sentence.split(": ")[0] == message.split(": ")[0]
    activated = "activated" in message
    if activated:
        assert sentence.endswith(": applied to the whole prompt as a plain LoRA")
    elif "PiSSA" in message:
        assert sentence.endswith(": applied as it is, which is right with the changed base model alone")
    else:
        assert sentence.endswith(": left out")
    assert adapter.invocation_tokens == ((5, 6) if activated else ())
    assert survey_adapter("x", path, base, unsupported=Unsupported.LEAVE_OUT) == adapter.summary


def test_many_tensors_are_listed_by_the_first_and_their_number(tmp_path, base):
    tensors = random_peft_tensors({V: SHAPES[V]})
    tensors |= {f"{PREFIX}model.layers.{i}.mlp.up_proj.lora_B.bias": np.ones(4, np.float32) for i in range(9)}
    path = make_peft_folder(tmp_path / "x", tensors)
    message = reason(lambda: read_adapter("x", path, base), path)
    assert "model.layers.3.mlp.up_proj.lora_B.bias and 5 more)" in message


def test_a_configuration_that_names_modules_to_save_without_their_weights_is_read_with_a_note(tmp_path, base):
    path = peft({"modules_to_save": ["lm_head"]})(tmp_path / "x")
    notes = read_adapter("x", path, base).notes
    assert notes[-1] == "modules_to_save names modules whose weights are not in the file: lm_head"


def test_nothing_is_unpickled(tmp_path, base):
    marker = tmp_path / "ran"
    path = pickled(tmp_path / "x")
    # opcodes that call os.system on a command, should anybody load them
    (path / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR.")
    for unsupported in Unsupported:
        with pytest.raises(InvalidAdapterFile, match="pickled"):
            read_adapter("x", path, base, unsupported=unsupported)
    assert not marker.exists()


def test_matching_that_would_take_too_long_is_refused(tmp_path, base):
    shapes = {module: shape for module, shape in SHAPES.items() if "layers" in module}
    config = peft_config(alpha_pattern={f"(a|{'b' * 40}){i}.*x.*": 8 for i in range(2048)})
    path = make_peft_folder(tmp_path / "x", random_peft_tensors(shapes), config)
    message = reason(lambda: read_adapter("x", path, base), path)
    assert message.startswith("adapter_config.json: alpha_pattern has too many patterns for so many modules")


def test_reasons_hold_no_control_characters(tmp_path, base):
    path = peft(**{"evil\n\x1b[31m.weight": np.ones(3)})(tmp_path / "x")
    message = reason(lambda: read_adapter("x", path, base), path)
    assert message.isprintable()
    assert re.search(r"evil\\n\\x1b\[31m\.weight", message)
    (path / "adapter_config.json").write_text(json.dumps(peft_config(base_model_name_or_path="a\nb")))
    assert read_adapter("x", path, base, unsupported=Unsupported.LEAVE_OUT).base_name == r"a\nb"
