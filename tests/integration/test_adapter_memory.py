"""More adapters than memory for them: everyone gets the right one, and the budget holds."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from proxies import SMALL, call, run_to_the_end, running_proxy
from servers import demo_adapters

QUESTION = {"messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0, "max_tokens": 16}
CHARACTERS = ("pirate", "robot", "wizard")
WIZARD_BYTES = 3041280
"""The largest of them in the engine's memory, in f16."""


def test_six_adapters_in_memory_for_two_all_answer_right_and_the_memory_is_bounded(tmp_path: Path, model: Path) -> None:
    demo = demo_adapters()
    names = [f"{name}-{copy}" for name in CHARACTERS for copy in "ab"]
    arguments = ["serve", "-m", str(model), *SMALL, "--adapter-memory", str(2 * WIZARD_BYTES)]
    arguments += ["--adapter-type", "f16"]
    arguments += [f"--adapter={name}={demo[name.partition('-')[0]]}" for name in names]
    with running_proxy(tmp_path, arguments) as server, ThreadPoolExecutor(8) as threads:

        def ask(name: str) -> tuple[str, int]:
            """The answer, and how much memory adapters took just after it."""
            status, _, body = call(server, "POST", "/v1/chat/completions", {**QUESTION, "lora": name})
            assert status == 200, body
            memory: dict[str, Any] = call(server, "GET", "/adapters")[2]["memory"]
            text: str = body["choices"][0]["message"]["content"]
            return text, memory["used"]

        alone = {name: ask(name)[0] for name in names}
        assert len(set(alone.values())) == len(CHARACTERS)
        order = [names[(7 * i) % len(names)] for i in range(len(names) * 5)]
        answers = list(threads.map(ask, order))
        assert [text for text, _ in answers] == [alone[name] for name in order]
        assert max(used for _, used in answers) <= 2 * WIZARD_BYTES
        metrics = call(server, "GET", "/metrics")[2]
        evictions = re.search(r"^loraproxy_adapter_evictions_total (\d+)", metrics, re.MULTILINE)
        assert evictions
        assert int(evictions[1]) > len(names)
        states = {adapter["name"]: adapter["state"] for adapter in call(server, "GET", "/adapters")[2]["data"]}
        assert set(states) == set(names)
        assert set(states.values()) == {"resident", "registered"}
        both = {"wizard-a": 1, "wizard-b": 0.5, "pirate-a": 0.1}
        status, _, body = call(server, "POST", "/v1/chat/completions", {**QUESTION, "lora": both})
        assert status == 400
        assert "--adapter-memory" in body["error"]["message"]


def test_adapters_to_be_preloaded_are_resident_before_the_first_request(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "watched"
    folder.mkdir()
    for name in CHARACTERS:
        (folder / name).symlink_to(demo_adapters()[name], target_is_directory=True)
    arguments = ["serve", "-m", str(model), *SMALL, "--adapters-dir", str(folder)]
    with running_proxy(tmp_path, [*arguments, "--preload", "robot", "--preload", "base"]) as server:
        states = {adapter["name"]: adapter["state"] for adapter in call(server, "GET", "/adapters")[2]["data"]}
    assert states == {"pirate": "registered", "robot": "resident", "wizard": "registered"}
    refused = run_to_the_end(*arguments, "--port", "0", "--preload", "robt")
    assert refused.returncode == 1
    assert "--preload: unknown adapter 'robt'; did you mean 'robot'?" in refused.stderr
    (folder / "broken.gguf").write_text("no adapter")
    refused = run_to_the_end(*arguments, "--port", "0", "--preload", "broken")
    assert refused.returncode == 1
    assert "--preload: " in refused.stderr
    assert "broken" in refused.stderr
