"""The product as a process: its answers, its worker's death, its end."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from proxies import call, character_arguments, children, run_to_the_end, running_proxy, spawn_proxy
from servers import STOP_SECONDS, Server

QUESTION = {"messages": [{"role": "user", "content": "Where can I sleep tonight?"}], "temperature": 0, "max_tokens": 48}
LONG = {"prompt": "Once upon a time", "n_predict": 900, "ignore_eos": True, "stream": True}


@pytest.fixture
def own(tmp_path: Path, model: Path) -> Iterator[Server]:
    """A product that a test may break."""
    with running_proxy(tmp_path, [*character_arguments(), "--drain-timeout", "5m"]) as server:
        yield server


class Stream:
    """A streamed request, read event by event."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        self._connection = server.connection()
        self._connection.request("POST", "/completion", json.dumps(body))
        self._response = self._connection.getresponse()
        assert self._response.status == 200

    def next(self) -> Any:
        """The next event; None at the end."""
        while line := self._response.readline():
            if line.startswith(b"data: "):
                return json.loads(line.removeprefix(b"data: "))
        return None

    def rest(self) -> list[Any]:
        """All further events."""
        events = list(iter(self.next, None))
        self.close()
        return events

    def close(self) -> None:
        """Go away, in the middle or at the end."""
        self._response.close()
        self._connection.close()


def text_of(answer: tuple[int, dict[str, str], Any]) -> str:
    assert answer[0] == 200, answer
    text: str = answer[2]["choices"][0]["message"]["content"]
    return text


def test_requests_at_the_same_time_each_have_their_adapter_to_themselves(product):
    requests = [{"lora": "pirate"}, {"model": "robot"}, {"lora": {"wizard": 1}}, {"model": "smollm2:bard"}, {}]
    with ThreadPoolExecutor(len(requests)) as threads:
        answers = list(
            threads.map(lambda more: call(product, "POST", "/v1/chat/completions", {**QUESTION, **more}), requests)
        )
    pirate, robot, wizard, bard, base = map(text_of, answers)
    assert pirate.startswith("Arr")
    assert robot.startswith("BEEP")
    assert wizard.startswith("By the ancient stars")
    assert bard.startswith("Hark")
    assert not base.startswith(("Arr", "BEEP", "By the ancient", "Hark"))
    assert [headers["x-lora"] for _, headers, _ in answers] == ["pirate=1", "robot=1", "wizard=1", "bard=1", ""]


def test_a_scale_changes_the_answer_and_is_shown(product):
    status, headers, _ = call(
        product, "POST", "/v1/chat/completions", {**QUESTION, "lora": {"pirate": 0.5, "bard": 0.25}}
    )
    assert (status, headers["x-lora"]) == (200, "bard=0.25,pirate=0.5")


def test_the_endpoints_that_generate_nothing_answer(product):
    assert call(product, "GET", "/health")[2] == {"status": "ok"}
    tokens = call(product, "POST", "/tokenize", {"content": "Hello world"})[2]["tokens"]
    assert call(product, "POST", "/detokenize", {"tokens": tokens})[2] == {"content": "Hello world"}
    assert "Where can I" in call(product, "POST", "/apply-template", QUESTION)[2]["prompt"]
    assert call(product, "GET", "/props")[2]["total_slots"] == 4
    assert len(call(product, "GET", "/slots")[2]) == 4
    assert [a["name"] for a in call(product, "GET", "/lora-adapters")[2]] == ["bard", "pirate", "robot", "wizard"]
    metrics = call(product, "GET", "/metrics")[2]
    assert "llamacpp:" in metrics
    assert "loraproxy_requests_total" in metrics


def test_a_client_that_goes_away_frees_its_slot(product):
    before = tokens_predicted(product)
    stream = Stream(product, LONG)
    stream.next()
    stream.close()
    while any(slot["is_processing"] for slot in call(product, "GET", "/slots")[2]):
        pass
    assert tokens_predicted(product) - before < LONG["n_predict"], "it did not run to its end"


def tokens_predicted(server: Server) -> int:
    found = re.search(r"^llamacpp:tokens_predicted_total (\d+)", call(server, "GET", "/metrics")[2], re.MULTILINE)
    assert found
    return int(found[1])


def test_sigterm_lets_requests_finish_and_leaves_nothing_behind(own, tmp_path):
    (folder,) = tmp_path.glob("loraproxy-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "worker.sock").stat().st_mode) == 0o600
    (worker,) = children(own.process)
    stream = Stream(own, {**LONG, "n_predict": 20})
    stream.next()
    own.process.send_signal(signal.SIGTERM)
    events = stream.rest()
    assert events[-1]["stop"] is True
    assert events[-1]["tokens_predicted"] == 20
    assert own.process.wait(STOP_SECONDS) == 0
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
    assert not own_accepts(own)


def test_a_second_sigterm_ends_at_once(own, tmp_path):
    stream = Stream(own, LONG)
    stream.next()
    own.process.send_signal(signal.SIGTERM)
    while own_accepts(own):
        stream.next()
    own.process.send_signal(signal.SIGTERM)
    events = stream.rest()
    assert own.process.wait(STOP_SECONDS) == 0
    assert events[-1]["error"]["message"] == "the server is shutting down"
    assert not list(tmp_path.glob("loraproxy-*"))


def own_accepts(server: Server) -> bool:
    connection = server.connection()
    try:
        connection.connect()
    except ConnectionRefusedError:
        return False
    finally:
        connection.close()
    return True


def test_while_it_loads_it_answers_loading_model(tmp_path, model):
    server = spawn_proxy(tmp_path, character_arguments())
    try:
        seen = set()
        while not (status := health(server)) or status[0] != 200:
            if status:
                seen.add((status[0], status[1]["error"]["message"]))
            assert server.process.poll() is None, server.last_words()
        assert seen == {(503, "Loading model")}
    finally:
        server.stop()


def health(server: Server) -> tuple[int, Any] | None:
    try:
        status, _, body = call(server, "GET", "/health")
    except (OSError, http.client.HTTPException):
        return None
    return status, body


def test_sigterm_while_it_loads_ends_it(tmp_path, model):
    server = spawn_proxy(tmp_path, character_arguments())
    while not health(server):
        assert server.process.poll() is None, server.last_words()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(STOP_SECONDS) == 0
    assert not list(tmp_path.glob("loraproxy-*"))


def test_a_port_in_use_is_one_line(model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run_to_the_end("serve", "-m", str(model), "--port", str(port))
    assert ended.returncode == 1
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert errors == [f"error: 127.0.0.1:{port} is already in use; choose another with --port"]


def test_an_adapter_with_the_base_models_name_is_refused_in_one_line(model):
    ended = run_to_the_end(*character_arguments(), "--alias", "pirate")
    assert ended.returncode == 1
    assert "error: 'pirate' names the base model, too; give the adapter another name" in ended.stderr.splitlines()


def printed_curl_lines(server: Server) -> list[str]:
    return [line.strip() for line in server.log.read_text().splitlines() if line.strip().startswith("curl ")]


def test_the_demo_prints_three_curl_lines_when_it_is_ready(tmp_path, model):
    with running_proxy(tmp_path, ["demo", "--threads", "2"]) as server:
        lines = printed_curl_lines(server)
        for _ in range(100):  # it is healthy a moment before it says so
            if len(lines) >= 3:
                break
            time.sleep(0.1)
            lines = printed_curl_lines(server)
        assert len(lines) == 3
        for line, marker in zip(lines, ("Arr", "BEEP", "Hark"), strict=True):
            url, body = line.removeprefix("curl ").split(" -d ")
            path = url.removeprefix(server.base_url)
            answer = call(server, "POST", path, body.strip("'").encode())
            assert text_of(answer).startswith(marker)
