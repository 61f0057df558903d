"""Every answer bears its request's id, and so does every log line of the request."""

import asyncio
import json
import logging

import pytest
from standin import running, soon

from loraproxy import logs
from loraproxy.backends.embedded import EmbeddedWorker
from loraproxy.config import HttpConfig, WorkerSettings

MINE = {"X-Request-Id": "mine-1"}


class Lines(list):
    """What is logged, as JSON objects."""

    def __init__(self):
        self.request_ended = asyncio.Event()


@pytest.fixture
def lines():
    found = Lines()

    class Collect(logging.Handler):
        def emit(self, record):
            text = logs.JsonFormatter().format(record)
            assert "\n" not in text
            found.append(json.loads(text))
            if record.name == logs.ACCESS.name:
                found.request_ended.set()

    handler, logger, access = Collect(), logging.getLogger("loraproxy"), logs.ACCESS.level
    handler.addFilter(logs.with_request_id)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(before)
    logs.ACCESS.setLevel(access)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/health", None, 200),
        ("HEAD", "/health", None, 200),
        ("POST", "/completion", b"{}", 200),
        ("POST", "/completion", b"{", 400),
        ("POST", "/completion", b'{"lora": "nobody"}', 400),
        ("POST", "/v1/embeddings", b"{}", 501),
        ("GET", "/nowhere", None, 404),
        ("OPTIONS", "/v1/chat/completions", None, 200),
        ("POST", "/completion", b'"' + b"x" * 2000 + b'"', 413),
        ("POST", "/api/chat", b"{", 400),
    ],
)
async def test_every_kind_of_answer_bears_the_id(tmp_path, method, path, body, status):
    async with (
        running(tmp_path, HttpConfig(max_body=1024)) as bench,
        bench.client.request(method, bench.url + path, data=body, headers=MINE) as answer,
    ):
        assert answer.status == status
        assert answer.headers.getall("X-Request-Id") == ["mine-1"]


async def test_a_refused_key_is_answered_with_the_id(tmp_path):
    async with running(tmp_path, keys=("one",)) as bench, bench.get("/props", headers=MINE) as answer:
        assert (answer.status, answer.headers["X-Request-Id"]) == (401, "mine-1")


async def test_an_answer_while_the_model_loads_bears_the_id(tmp_path):
    async with running(tmp_path, started=False) as bench, bench.get("/props", headers=MINE) as answer:
        assert (answer.status, answer.headers["X-Request-Id"]) == (503, "mine-1")


async def test_a_stream_bears_the_id_and_so_does_what_the_worker_is_asked(tmp_path):
    async with running(tmp_path) as bench:
        async with bench.post("/completion", {"wish": "stream"}, headers=MINE) as answer:
            assert answer.headers["X-Request-Id"] == "mine-1"
            for _ in range(3):
                bench.worker.go_on.release()
            await soon(answer.read())
        assert bench.worker.ids == ["mine-1"]


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\tb", "ä"])
async def test_an_id_that_could_spoil_a_log_is_replaced(tmp_path, given):
    async with running(tmp_path) as bench, bench.get("/health", headers={"X-Request-Id": given}) as answer:
        made = answer.headers["X-Request-Id"]
        assert made != given
        assert len(made) == 32


async def test_a_fault_of_ours_is_logged_under_the_id_that_its_answer_names(tmp_path, lines, monkeypatch):
    async with running(tmp_path) as bench:
        monkeypatch.setattr(type(bench.pool), "check_ready", lambda self: 1 / 0)
        async with bench.get("/health") as answer:
            assert answer.status == 500
            name = answer.headers["X-Request-Id"]
            assert name in (await answer.json())["error"]["message"]
    fault = next(line for line in lines if line["level"] == "error")
    assert fault["request_id"] == name
    assert "ZeroDivisionError" in fault["exception"]


async def test_requests_on_one_connection_are_logged_under_their_own_ids(tmp_path, lines):
    logs.show_requests()
    async with running(tmp_path) as bench:
        for name in ("one", "two"):
            async with bench.get("/health", headers={"X-Request-Id": name}) as answer:
                await answer.read()
    assert [line["request_id"] for line in lines if line["logger"] == "loraproxy.access"] == ["one", "two"]


async def test_a_finished_request_is_logged_with_its_figures_and_without_its_secrets(tmp_path, lines):
    logs.show_requests()
    async with running(tmp_path, keys=("secret",)) as bench:
        headers = {**MINE, "Authorization": "Bearer secret"}
        body = {"lora": {"pirate": 0.5}, "prompt": "secret", "wish": "stream"}
        async with bench.post("/completion?key=secret", body, headers=headers) as answer:
            for _ in range(3):
                bench.worker.go_on.release()
            await soon(answer.read())
        await soon(lines.request_ended.wait())
    line = next(line for line in lines if line["logger"] == "loraproxy.access")
    assert {name: line[name] for name in ("method", "path", "status", "outcome", "lora", "request_id")} == {
        "method": "POST",
        "path": "/completion",
        "status": 200,
        "outcome": "ok",
        "lora": "pirate=0.5",
        "request_id": "mine-1",
    }
    assert 0 <= line["queue_seconds"] <= line["ttft_seconds"] <= line["seconds"]
    assert "secret" not in json.dumps(lines)


async def test_nothing_is_logged_of_a_request_unless_it_is_asked_for(tmp_path, lines):
    logs.ACCESS.setLevel(logging.WARNING)
    async with running(tmp_path) as bench, bench.get("/health") as answer:
        await answer.read()
    assert not [line for line in lines if line["logger"] == "loraproxy.access"]


async def test_a_path_cannot_forge_a_log_line(tmp_path, lines):
    logs.show_requests()
    async with running(tmp_path) as bench, bench.get("/a%0Aevent=forged") as answer:
        assert answer.status == 404
    line = next(line for line in lines if line["logger"] == "loraproxy.access")
    assert line["path"] == "/a%0Aevent=forged"


def record(message, *arguments, **extra):
    made = logging.LogRecord("loraproxy.x", logging.WARNING, "", 0, message, arguments, None)
    vars(made).update(extra)
    return made


def test_a_line_of_text_has_message_fields_and_id():
    formatter = logs.TextFormatter("%(levelname)s %(message)s")
    line = formatter.format(record("event=%s", "request", fields={"status": 200}, request_id="r1"))
    assert line == "WARNING event=request status=200 request=r1"
    assert formatter.format(record("hello")) == "WARNING hello"


def test_a_json_line_is_one_object_that_fields_cannot_overwrite():
    line = logs.JsonFormatter().format(record("a\nb", fields={"message": "forged", "status": 200}, request_id="r1"))
    assert "\n" not in line
    value = json.loads(line)
    assert value.pop("time").endswith("Z")
    assert value == {
        "level": "warning",
        "logger": "loraproxy.x",
        "message": "a\nb",
        "request_id": "r1",
        "status": 200,
    }


def test_a_line_of_the_workers_log_keeps_the_id_that_the_worker_gave_it(lines, tmp_path):
    worker = EmbeddedWorker(WorkerSettings(model=tmp_path / "m.gguf", socket=tmp_path / "s"))
    worker._log_line(b"2026-01-02 03:04:05,678 ERROR loraproxy.worker.app event=request_failed request=mine-1")
    worker._log_line(b"2026-01-02 03:04:05,678 INFO loraproxy.worker event=ready")
    assert [(line["message"], line.get("request_id")) for line in lines] == [
        ("worker: event=request_failed", "mine-1"),
        ("worker: event=ready", None),
    ]
