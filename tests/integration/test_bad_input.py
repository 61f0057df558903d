"""Bad input through the whole product: what the client gets, and what ends the start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from loraproxy.cli import main
from proxies import call, run_to_the_end
from servers import demo_adapters

KNOWN = "known adapters: bard, pirate, robot, wizard"
INVALID = "invalid_request_error"


def error(answer: Any) -> tuple[int, str, str]:
    """(status, type, message), the body checked against llama-server's form."""
    status, headers, body = answer
    assert headers["content-type"] == "application/json; charset=utf-8"
    assert body.keys() == {"error"}
    assert body["error"]["code"] == status
    return status, body["error"]["type"], body["error"]["message"]


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ({"lora": "pirat"}, f"unknown adapter 'pirat'; did you mean 'pirate'? {KNOWN}"),
        ({"adapter_id": "nobody"}, f"unknown adapter 'nobody'; {KNOWN}"),
        (
            {"lora": [{"id": 9, "scale": 1}]},
            "unknown adapter id 9; known ids: 0 (bard), 1 (pirate), 2 (robot), 3 (wizard)",
        ),
        ({"lora": [{"id": -1, "scale": 1}]}, "lora[0].id must not be negative"),
        ({"lora": 7}, "lora must not be a number; use "),
        ({"lora": [[]]}, "lora[0] must not be a list; use "),
        ({"lora": [{"id": "0", "scale": 1}]}, "lora[0].id must be a whole number, not a string"),
        ({"lora": [{"id": 0.5, "scale": 1}]}, "lora[0].id must be a whole number, not a number"),
        ({"lora": [{"id": 0, "scale": "1"}]}, "lora[0].scale must be a number, not a string"),
        ({"lora": [{"id": 0, "scale": None}]}, "lora[0].scale must be a number, not null"),
        ({"lora": [{"id": 0}]}, 'lora[0] has an "id" but no "scale"; use '),
        ({"lora": [{"scale": 1}]}, 'lora[0] has neither "id" nor "name"; use '),
        ({"lora": ["pirate", "pirate"]}, "lora names adapter 'pirate' (id 1) twice"),
        ({"lora": [{"id": 0, "scale": 1}] * 10_000}, "lora has 10000 entries; at most 32 adapters can run together"),
        ({"lora": {"pirate": 1e300}}, "lora: the scale of adapter 1 is not a finite number"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_selector_is_400_and_says_what_would_be_right(product, path, selector, message):
    body = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **selector}
    status, kind, shown = error(call(product, "POST", path, body))
    assert (status, kind) == (400, INVALID)
    assert shown.startswith(message)


def test_an_unknown_adapter_in_the_url_is_400(product):
    answer = call(product, "POST", "/lora/pirat/v1/completions", {"prompt": "hi"})
    assert error(answer) == (400, INVALID, f"unknown adapter 'pirat'; did you mean 'pirate'? {KNOWN}")


@pytest.mark.parametrize(
    "path", ["/completion", "/v1/chat/completions", "/tokenize", "/apply-template", "/lora-adapters"]
)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "x"',
        b"{'prompt': 1}",
        b'{"a": NaN}',
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'"x"',
        b"7",
    ],
    ids=lambda body: repr(body[:16]),
)
def test_a_broken_body_is_400_everywhere(product, path, body):
    status, kind, message = error(call(product, "POST", path, body))
    assert (status, kind) == (400, INVALID)
    assert message


def test_a_nan_scale_is_400(product):
    body = b'{"prompt": "hi", "lora": [{"id": 0, "scale": NaN}]}'
    assert error(call(product, "POST", "/completion", body)) == (
        400,
        INVALID,
        "the request body is not JSON: NaN is not a JSON number",
    )


def test_a_huge_body_is_413(product):
    body = b'{"prompt": "' + b"x" * (33 * 1024**2) + b'"}'
    for path in ("/completion", "/tokenize"):
        assert error(call(product, "POST", path, body)) == (
            413,
            INVALID,
            "the request body is larger than 33554432 bytes (http.max_body)",
        )


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_is_400_with_the_counts(product, path, stream):
    long = "word " * 2000
    body = {"prompt": long, "messages": [{"role": "user", "content": long}], "stream": stream, "lora": "pirate"}
    answer = call(product, "POST", path, body)
    status, kind, message = error(answer)
    counts = answer[2]["error"]
    assert (status, kind) == (400, "exceed_context_size_error")
    assert counts["n_ctx"] == 1024
    assert counts["n_prompt_tokens"] > 2000
    assert message == (
        f"request ({counts['n_prompt_tokens']} tokens) exceeds the available context size (1024 tokens), "
        "try increasing it"
    )


def test_the_product_still_answers_after_all_of_this(product):
    status, headers, body = call(product, "POST", "/completion", {"prompt": "hi", "n_predict": 1, "lora": "robot"})
    assert (status, headers["x-lora"]) == (200, "robot=1")
    assert body["tokens_predicted"] == 1


# Adapter files and models that end the start.


@pytest.fixture
def start_error(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a start that must fail prints: one line on stderr, exit code 1."""

    def start(model: Path, *arguments: str) -> str:
        assert main(["serve", "-m", str(model), "--port", "0", *arguments]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        return error_line(printed.err)

    return start


def error_line(printed: str) -> str:
    (line,) = (line for line in printed.splitlines() if line.startswith("error: "))
    assert "Traceback" not in printed
    return line.removeprefix("error: ")


def gguf_adapter(path: Path, architecture: str = "llama", a_shape: tuple[int, int] = (4, 576)) -> Path:
    """A GGUF adapter for the first query projection of SmolLM2, right unless told otherwise."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.full(a_shape, 0.01, np.float32))
    writer.add_tensor("blk.0.attn_q.weight.lora_b", np.full((576, 4), 0.01, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_an_adapter_for_another_architecture_ends_the_start(tmp_path, model, start_error):
    path = gguf_adapter(tmp_path / "other.gguf", architecture="gemma2")
    message = start_error(model, "--adapter", f"other={path}")
    assert message.startswith(f"adapter 'other' ({path}): ")
    assert "gemma2" in message
    assert "llama" in message


def test_the_process_ends_with_the_reason(tmp_path, model):
    path = gguf_adapter(tmp_path / "cut.gguf")
    path.write_bytes(path.read_bytes()[:-1])
    ended = run_to_the_end("serve", "-m", str(model), "--port", "0", "--adapter", f"cut={path}")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert error_line(ended.stderr).startswith(f"adapter 'cut' ({path}): ")


def test_a_truncated_gguf_ends_the_start(tmp_path, model, start_error):
    path = gguf_adapter(tmp_path / "cut.gguf")
    whole = path.read_bytes()
    for length in (0, 3, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert start_error(model, "--adapter", f"cut={path}").startswith(f"adapter 'cut' ({path}): ")


def test_a_tensor_of_the_wrong_shape_ends_the_start_and_is_named(tmp_path, model, start_error):
    path = gguf_adapter(tmp_path / "wide.gguf", a_shape=(4, 577))
    message = start_error(model, "--adapter", f"wide={path}")
    assert "blk.0.attn_q.weight" in message
    assert "577" in message
    assert "576" in message


def test_a_peft_tensor_of_the_wrong_shape_ends_the_start_and_is_named(tmp_path, model, start_error):
    folder = Path(shutil.copytree(demo_adapters()["robot"], tmp_path / "robot"))
    weights = load_file(folder / "adapter_model.safetensors")
    name = next(iter(weights))
    weights[name] = np.ascontiguousarray(weights[name][:, :-1])
    save_file(weights, folder / "adapter_model.safetensors")
    message = start_error(model, "--adapter", f"robot={folder}")
    assert message.startswith(f"adapter 'robot' ({folder}): ")
    assert "shape" in message or "rank" in message


def test_a_peft_folder_without_weights_ends_the_start(tmp_path, model, start_error):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    assert "no adapter_model.safetensors" in start_error(model, "--adapter", f"x={tmp_path / 'x'}")


def test_an_adapter_that_does_not_exist_ends_the_start(tmp_path, model, start_error):
    assert f"adapter 'x' ({tmp_path}/nowhere): " in start_error(model, "--adapter", f"x={tmp_path}/nowhere")


def test_a_name_that_no_adapter_may_bear_ends_the_start(model, start_error):
    assert "reserved" in start_error(model, "--adapter", f"none={demo_adapters()['robot']}")


def test_an_adapter_given_as_the_model_ends_the_start(tmp_path, start_error):
    path = gguf_adapter(tmp_path / "adapter.gguf")
    assert f"base model {path}: " in start_error(path)


def test_a_truncated_model_ends_the_start(tmp_path, model, start_error):
    path = tmp_path / "cut.gguf"
    with model.open("rb") as whole:
        path.write_bytes(whole.read(50_000_000))
    assert "cut.gguf" in start_error(path)
