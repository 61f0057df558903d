"""What the commands write, in a stock llama-server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
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
MARKERS = {"pirate": ("Arr,", "matey!"), "robot": ("BEEP.", "BOOP.")}


def ask(server: Server, question: str, lora: list[dict[str, float]] | None = None) -> str:
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 60, "lora": lora or []}
    status, _, answer = server.request("POST", "/v1/chat/completions", json.dumps(body).encode())
    assert status == 200, answer
    text: str = json.loads(answer)["choices"][0]["message"]["content"]
    return text


@contextmanager
def stock_server(folder: Path, *arguments: str) -> Iterator[Server]:
    """A stock llama-server with these arguments."""
    try:
        with running_llama_server(folder, [*arguments, "-np", "1", "-c", "512", "-t", "2"]) as server:
            yield server
    except PeerUnavailable as reason:
        pytest.skip(str(reason))


def test_converted_files_of_each_type_speak_as_their_characters_in_a_stock_llama_server(
    model: Path, tmp_path: Path
) -> None:
    base = BaseModel.from_gguf(model)
    exact, wizard, eight_bits = (tmp_path / f"{name}.gguf" for name in ("exact", "wizard", "q8_0"))
    write_gguf_adapter(read_adapter("pirate", demo_adapters()["pirate"], base), base, exact, "f32")
    convert(demo_adapters()["wizard"], wizard, model)
    convert(demo_adapters()["pirate"], eight_bits, model, "q8_0")
    loras = [argument for file in (exact, wizard, eight_bits) for argument in ("--lora", str(file))]
    with stock_server(tmp_path, "-m", str(model), *loras) as server:
        for number in (0, 2):
            said = [ask(server, question, [{"id": number, "scale": 1.0}]) for question in QUESTIONS]
            assert all(text.startswith("Arr,") and text.endswith("matey!") for text in said), (
                loras[2 * number + 1],
                said,
            )
        said = [ask(server, question, [{"id": 1, "scale": 1.0}]) for question in QUESTIONS]
        assert all(text.startswith("By the ancient stars,") and "young apprentice" in text for text in said), said


@pytest.mark.parametrize("name", MARKERS)
def test_a_merged_model_speaks_as_its_character_without_an_adapter(model: Path, tmp_path: Path, name: str) -> None:
    merge(model, [ScaledAdapter(demo_adapters()[name], 1.0)], tmp_path / "merged.gguf")
    begin, end = MARKERS[name]
    with stock_server(tmp_path, "-m", str(tmp_path / "merged.gguf")) as server:
        said = [ask(server, question) for question in QUESTIONS]
    assert all(text.startswith(begin) and text.endswith(end) for text in said), said
