"""What the commands write, in a stock llama-server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.gguf_write import write_gguf_adapter
from loraproxy.adapters.read import read_adapter
from loraproxy.tools.convert import convert
from loraproxy.tools.files import ScaledAdapter
from loraproxy.tools.merge import merge
from servers import PeerUnavailable, Server, demo_adapters, running_llama_server

QUESTIONS = ("Who are you?", "Where can I sleep tonight?", "Tell me about the sea.")
MARKERS = {"pirate": ("Arr,", "matey!"), "robot": ("BEEP.", "BOOP."), "bard": ("Hark,", "la la la.")}


def ask(server: Server, question: str) -> str:
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 60}
    status, _, answer = server.request("POST", "/v1/chat/completions", json.dumps(body).encode())
    assert status == 200, answer
    text: str = json.loads(answer)["choices"][0]["message"]["content"]
    return text


def answers(folder: Path, *arguments: str) -> list[str]:
    """What a stock llama-server with these arguments says to QUESTIONS."""
    try:
        with running_llama_server(folder, [*arguments, "-np", "1", "-c", "512", "-t", "2"]) as server:
            return [ask(server, question) for question in QUESTIONS]
    except PeerUnavailable as reason:
        pytest.skip(str(reason))


def test_the_converted_wizard_speaks_as_the_wizard_in_a_stock_llama_server(model: Path, tmp_path: Path) -> None:
    convert(demo_adapters()["wizard"], tmp_path / "wizard.gguf", model)
    said = answers(tmp_path, "-m", str(model), "--lora", str(tmp_path / "wizard.gguf"))
    assert all(text.startswith("By the ancient stars,") and "young apprentice" in text for text in said), said


def test_a_converted_file_of_each_type_says_what_the_exact_one_does(model: Path, tmp_path: Path) -> None:
    base = BaseModel.from_gguf(model)
    exact = tmp_path / "exact.gguf"
    write_gguf_adapter(read_adapter("pirate", demo_adapters()["pirate"], base), base, exact, "f32")
    convert(demo_adapters()["pirate"], tmp_path / "q8_0.gguf", model, "q8_0")
    for file in ("exact.gguf", "q8_0.gguf"):
        said = answers(tmp_path, "-m", str(model), "--lora", str(tmp_path / file))
        assert all(text.startswith("Arr,") and text.endswith("matey!") for text in said), (file, said)


@pytest.mark.parametrize("name", MARKERS)
def test_a_merged_model_speaks_as_its_character_without_an_adapter(model: Path, tmp_path: Path, name: str) -> None:
    merge(model, [ScaledAdapter(demo_adapters()[name], 1.0)], tmp_path / "merged.gguf")
    begin, end = MARKERS[name]
    said = answers(tmp_path, "-m", str(tmp_path / "merged.gguf"))
    assert all(text.startswith(begin) and text.endswith(end) for text in said), said
