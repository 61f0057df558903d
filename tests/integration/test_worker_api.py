"""The embedded worker as a process: its life, and its API on a real model with real adapters."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from servers import REPOSITORY, START_SECONDS, STOP_SECONDS, Server, demo_adapters, running_worker, spawn_worker

GREEDY = {"temperature": 0, "n_predict": 12}
LORA = [{"id": index, "name": name, "path": path} for index, (name, path) in enumerate(demo_adapters().items())]
ID = {adapter["name"]: adapter["id"] for adapter in LORA}


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Server]:
    """A worker with the demo's four characters."""
    with running_worker(tmp_path_factory.mktemp("characters"), model=model, adapters=LORA) as server:
        yield server


def post(server: Server, path: str, body: Any) -> tuple[int, Any]:
    status, _, answer = server.request("POST", path, json.dumps(body).encode())
    return status, json.loads(answer)


def get(server: Server, path: str) -> Any:
    return json.loads(server.request("GET", path)[2])


def answer(server: Server, path: str, body: Any) -> Any:
    status, body = post(server, path, body)
    assert status == 200, body
    return body


def events(server: Server, path: str, body: Any) -> list[Any]:
    status, kind, data = server.request("POST", path, json.dumps({**body, "stream": True}).encode())
    assert (status, kind) == (200, "text/event-stream"), data
    blocks = [block.removeprefix("data: ") for block in data.decode().split("\n\n")[:-1]]
    return [json.loads(block) for block in blocks if block != "[DONE]"]


# its life


def test_it_answers_503_while_it_loads_then_200_and_its_socket_is_its_owners_alone(tmp_path: Path, model: Path) -> None:
    server = spawn_worker(tmp_path, model=model)
    try:
        while not server.socket.exists():  # type: ignore[union-attr]
            with pytest.raises(subprocess.TimeoutExpired):
                server.process.wait(0.01)
        assert stat.S_IMODE(os.stat(server.socket).st_mode) == 0o600  # type: ignore[arg-type]
        seen = set()
        while 200 not in seen:
            status, _, body = server.request("GET", "/health")
            if status != 200:
                expected = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
                assert (status, json.loads(body)) == (503, expected)
            seen.add(status)
        assert seen == {200, 503}
    finally:
        assert server.stop() == 0
    assert not server.socket.exists()  # type: ignore[union-attr]


@pytest.mark.parametrize("content", [b"not a model", None])
def test_a_model_that_cannot_be_loaded_is_one_line_and_status_1(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "broken.gguf"
    if content is not None:
        path.write_bytes(content)
    server = spawn_worker(tmp_path, model=path)
    assert server.process.wait(START_SECONDS) == 1
    errors = [line for line in server.last_words().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "broken.gguf" in errors[0]
    assert "Traceback" not in server.last_words()


def test_settings_that_are_wrong_are_one_line_and_status_1(tmp_path: Path) -> None:
    settings = tmp_path / "settings.json"
    settings.write_text('{"model": "m.gguf", "socket": "s", "paralel": 3}')
    command = [sys.executable, "-m", "loraproxy.worker", "--settings", str(settings)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    assert done.returncode == 1
    assert "error: " in done.stderr
    assert "paralel" in done.stderr


def test_sigterm_while_loading_ends_it(tmp_path: Path, model: Path) -> None:
    server = spawn_worker(tmp_path, model=model)
    while not server.socket.exists():  # type: ignore[union-attr]
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(0.01)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(STOP_SECONDS) == 0


def test_it_ends_when_its_parent_dies(tmp_path: Path, model: Path) -> None:
    script = textwrap.dedent(f"""
        import os, sys
        from pathlib import Path
        sys.path.insert(0, {str(REPOSITORY / "tests")!r})
        from servers import spawn_worker
        spawn_worker(Path({str(tmp_path)!r})).wait_until_healthy()
        print("ready", flush=True)
        sys.stdin.read()
        os._exit(0)
    """)
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(tmp_path / "worker.sock"))
            connection.settimeout(STOP_SECONDS)
            parent.communicate()
            assert connection.recv(1) == b""
    assert not (tmp_path / "worker.sock").exists()
    assert "event=parent_gone" in (tmp_path / "worker.log").read_text()
    assert not (tmp_path / "settings.json").exists()


# its answers


def test_a_greedy_completion_is_the_same_streamed_or_not_through_every_api(worker: Server) -> None:
    prompt = "The capital of France is"
    whole = answer(worker, "/completion", {"prompt": prompt, **GREEDY})
    assert (whole["tokens_predicted"], whole["stop_type"], whole["truncated"]) == (12, "limit", False)
    streamed = events(worker, "/completion", {"prompt": prompt, **GREEDY})
    assert "".join(event["content"] for event in streamed) == whole["content"]
    assert streamed[-1]["tokens_evaluated"] == whole["tokens_evaluated"]
    openai = answer(worker, "/v1/completions", {"prompt": prompt, **GREEDY})
    assert openai["choices"][0]["text"] == whole["content"]
    assert openai["usage"]["total_tokens"] == whole["tokens_evaluated"] + 12
    chat = {"messages": [{"role": "user", "content": "Say hello."}], **GREEDY}
    text = answer(worker, "/v1/chat/completions", chat)["choices"][0]["message"]["content"]
    deltas = [choice["delta"] for event in events(worker, "/v1/chat/completions", chat) for choice in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == text
    applied = answer(worker, "/apply-template", chat)["prompt"]
    assert answer(worker, "/completion", {"prompt": applied, **GREEDY})["content"] == text


def test_tokens_go_there_and_back(worker: Server) -> None:
    text = "Grüße, 世界! <|im_end|> 🙂"
    tokens = answer(worker, "/tokenize", {"content": text})["tokens"]
    assert answer(worker, "/detokenize", {"tokens": tokens}) == {"content": text}
    same = answer(worker, "/completion", {"prompt": tokens, **GREEDY})
    assert same["content"] == answer(worker, "/completion", {"prompt": text, **GREEDY})["content"]


def test_characters_outside_of_one_token_arrive_whole(worker: Server) -> None:
    body = {"prompt": "Some emojis: 🙂, 🚀, 🙂, 🚀,", "temperature": 0, "n_predict": 16}
    text = "".join(event["content"] for event in events(worker, "/completion", body))
    assert "🚀" in text
    assert "\N{REPLACEMENT CHARACTER}" not in text[:-1]


def test_a_stop_string_ends_the_text_before_it(worker: Server) -> None:
    body = {"prompt": "1, 2, 3, 4, 5, 6,", "temperature": 0, "n_predict": 40, "stop": [" 9"]}
    whole = answer(worker, "/completion", body)
    assert (whole["stop_type"], whole["stopping_word"]) == ("word", " 9")
    assert whole["content"].endswith("8,")
    assert "".join(event["content"] for event in events(worker, "/completion", body)) == whole["content"]
    chat = {**body, "messages": [{"role": "user", "content": "Count to 20 in digits: 1 2 3"}]}
    assert answer(worker, "/v1/chat/completions", chat)["choices"][0]["finish_reason"] in ("stop", "length")


def test_a_schema_binds_the_answer(worker: Server) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    chat = {
        "messages": [{"role": "user", "content": "How old is a cat? Answer in JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        "max_tokens": 60,
        "temperature": 0,
    }
    content = answer(worker, "/v1/chat/completions", chat)["choices"][0]["message"]["content"]
    assert isinstance(json.loads(content)["age"], int)
    bound = answer(worker, "/completion", {"prompt": "x", "grammar": 'root ::= "yes" | "no"', "n_predict": 20})
    assert bound["content"] in ("yes", "no")


def test_a_grammar_that_is_wrong_is_a_400(worker: Server) -> None:
    status, body = post(worker, "/completion", {"prompt": "x", "grammar": "root ::= (", "stream": True})
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert "grammar" in body["error"]["message"]


def test_logit_bias_forces_and_forbids(worker: Server) -> None:
    token = answer(worker, "/tokenize", {"content": " blue"})["tokens"][0]
    body = {"prompt": "The sky is", "temperature": 0, "n_predict": 1}
    assert answer(worker, "/completion", {**body, "logit_bias": [[token, 100]]})["content"] == " blue"
    first = answer(worker, "/completion", {**body, "return_tokens": True})["tokens"][0]
    banned = answer(worker, "/completion", {**body, "return_tokens": True, "logit_bias": [[first, False]]})
    assert banned["tokens"][0] != first


def test_probabilities_are_sorted_and_include_the_chosen_token(worker: Server) -> None:
    body = {"prompt": "One plus one is", **GREEDY, "n_probs": 5}
    for token in answer(worker, "/completion", body)["completion_probabilities"]:
        top = [candidate["logprob"] for candidate in token["top_logprobs"]]
        assert len(top) == 5
        assert top == sorted(top, reverse=True)
        assert token["id"] == token["top_logprobs"][0]["id"]
        assert top[0] <= 0


def test_a_seed_repeats_an_answer_and_completions_of_one_request_differ(worker: Server) -> None:
    body = {"prompt": "Once upon a time", "n_predict": 16, "temperature": 1.5, "seed": 42}
    first, second = (answer(worker, "/completion", body)["content"] for _ in range(2))
    assert first == second
    several = answer(worker, "/completion", {**body, "n": 3})
    assert several[0]["content"] == first
    assert len({one["content"] for one in several}) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_does_not_fit_is_a_400_with_the_counts(worker: Server, stream: bool) -> None:
    status, body = post(worker, "/completion", {"prompt": [100] * 2000, "stream": stream})
    assert status == 400
    assert body["error"]["type"] == "exceed_context_size_error"
    assert (body["error"]["n_prompt_tokens"], body["error"]["n_ctx"]) == (2000, 512)


def test_a_full_context_ends_the_answer(worker: Server) -> None:
    body = {"prompt": [100] * 490, "temperature": 0, "ignore_eos": True}
    whole = answer(worker, "/completion", body)
    assert (whole["stop_type"], whole["truncated"]) == ("limit", True)
    assert whole["tokens_cached"] <= 512


def test_a_client_that_goes_away_frees_its_slot(worker: Server) -> None:
    connection = worker.connection()
    body = {"prompt": "x", "stream": True, "ignore_eos": True, "n_predict": 500}
    connection.request("POST", "/completion", json.dumps(body))
    with connection.getresponse() as response:
        assert response.readline().startswith(b"data: ")
        assert any(slot["is_processing"] for slot in get(worker, "/slots"))
        connection.close()
    polls = 0
    while any(slot["is_processing"] for slot in get(worker, "/slots")):
        polls += 1
        assert polls < 2000


def test_every_character_speaks_in_its_own_way_in_one_batch(characters: Server) -> None:
    def say(name: str | None) -> str:
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": "Who are you?"}],
            "temperature": 0,
            "max_tokens": 24,
        }
        if name is not None:
            body["lora"] = [{"id": ID[name], "scale": 1.0}]
        text: str = answer(characters, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
        return text

    names = [*ID, None]
    with ThreadPoolExecutor(len(names)) as pool:
        together = dict(zip(names, pool.map(say, names), strict=True))
    assert "Arr" in together["pirate"]
    assert "BEEP" in together["robot"]
    assert len(set(together.values())) == len(names)
    assert {name: say(name) for name in names} == together


def test_adapters_are_listed_and_unknown_ones_refused(characters: Server) -> None:
    assert [adapter["id"] for adapter in get(characters, "/lora-adapters")] == [0, 1, 2, 3]
    status, body = post(characters, "/completion", {"prompt": "x", "lora": [{"id": 9, "scale": 1}]})
    assert status == 400
    assert "no adapter has the id 9; known ids: 0, 1, 2, 3" in body["error"]["message"]


def test_metrics_count_what_was_generated(worker: Server) -> None:
    def predicted() -> float:
        lines = worker.request("GET", "/metrics")[2].decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("llamacpp:tokens_predicted_total"))

    before = predicted()
    answer(worker, "/completion", {"prompt": "x", **GREEDY, "ignore_eos": True})
    assert predicted() == before + 12


def test_a_connection_that_breaks_within_a_request_harms_nobody(worker: Server) -> None:
    connection = worker.connection()
    connection.putrequest("POST", "/completion")
    connection.putheader("Content-Length", "1000")
    connection.endheaders(b'{"prompt": ')
    connection.close()
    with pytest.raises(http.client.HTTPException):
        connection.getresponse()
    assert get(worker, "/health") == {"status": "ok"}
