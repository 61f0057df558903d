"""Metrics and logs of the product as a process: they say what its answers say."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxies import call, character_arguments, children, running_proxy
from servers import Server

CHAT = {
    "messages": [{"role": "user", "content": "Tell me of the harbour."}],
    "temperature": 0,
    "max_tokens": 16,
    "stream": True,
    "stream_options": {"include_usage": True},
}
Samples = dict[tuple[Any, ...], float]


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Server]:
    """A product that logs every request, as JSON."""
    folder = tmp_path_factory.mktemp("talkative")
    with running_proxy(folder, [*character_arguments(), "--log-format", "json", "--log-requests"]) as server:
        yield server


def scrape(server: Server) -> Samples:
    """Every sample by name and labels, once no request is in flight; none is there twice."""
    while True:
        found: Samples = {}
        for family in text_string_to_metric_families(call(server, "GET", "/metrics")[2]):
            for sample in family.samples:
                key = (sample.name, *sorted(sample.labels.items()))
                assert key not in found
                found[key] = sample.value
        if not found[("loraproxy_requests_in_flight",)]:
            return found


def of(samples: Samples, name: str, **labels: str) -> float:
    return samples[(name, *sorted(labels.items()))]


def log_lines(server: Server) -> list[dict[str, Any]]:
    """What is logged so far; the one line that is no log goes to stdout."""
    complete = server.log.read_text().rpartition("\n")[0].splitlines()
    return [json.loads(line) for line in complete if not line.startswith("listening on ")]


def events(server: Server, path: str, body: dict[str, Any], name: str) -> Iterator[Any]:
    connection = server.connection()
    connection.request("POST", path, json.dumps(body), {"X-Request-Id": name})
    response = connection.getresponse()
    assert response.headers["X-Request-Id"] == name
    while line := response.readline():
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))
    connection.close()


def line_of(server: Server, name: str) -> dict[str, Any]:
    """The line that tells of the request ``name``'s end."""
    while True:
        for line in log_lines(server):
            if line["logger"] == "loraproxy.access" and line["request_id"] == name:
                return line


def test_metrics_and_log_say_what_a_stream_said_of_itself(talkative: Server) -> None:
    received = list(events(talkative, "/lora/pirate/v1/chat/completions", CHAT, "mine-1"))
    usage = received[-1]["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    found = scrape(talkative)
    endpoint = "/v1/chat/completions"
    assert of(found, "loraproxy_requests_total", endpoint=endpoint, adapter="pirate", outcome="ok") == 1
    assert of(found, "loraproxy_tokens_total", adapter="pirate", kind="generated") == usage["completion_tokens"]
    assert of(found, "loraproxy_tokens_total", adapter="pirate", kind="prompt") == usage["prompt_tokens"] - cached
    assert of(found, "llamacpp:tokens_predicted_total") >= usage["completion_tokens"]
    assert 1 <= of(found, "loraproxy_inter_token_seconds_count") < usage["completion_tokens"] + 2
    for histogram in ("queue_seconds", "time_to_first_token_seconds"):
        assert of(found, f"loraproxy_{histogram}_count") == 1
    assert of(found, "loraproxy_workers", state="ready") == 1
    assert of(found, "loraproxy_leases_in_flight") == 0
    assert of(found, "loraproxy_adapter_resident_bytes") > 0
    line = line_of(talkative, "mine-1")
    assert line["path"] == "/lora/pirate/v1/chat/completions"
    assert (line["lora"], line["outcome"], line["status"]) == ("pirate=1", "ok", 200)
    assert line["generated_tokens"] == usage["completion_tokens"]
    assert 0 <= line["queue_seconds"] <= line["ttft_seconds"] <= line["seconds"]
    assert "harbour" not in talkative.log.read_text()


def test_a_killed_worker_is_counted_and_its_requests_line_says_error(talkative: Server) -> None:
    long = {"prompt": "Once upon a time", "n_predict": 900, "ignore_eos": True, "stream": True}
    stream = events(talkative, "/completion", long, "mine-2")
    next(stream)
    before = of(samples_now(talkative), "llamacpp:tokens_predicted_total")
    os.kill(children(talkative.process)[0], signal.SIGKILL)
    assert "error" in list(stream)[-1]
    line = line_of(talkative, "mine-2")
    assert (line["outcome"], line["status"]) == ("error", 200)
    assert call(talkative, "POST", "/completion", {"prompt": "Hello", "n_predict": 1})[0] == 200  # by the next worker
    found = scrape(talkative)
    assert of(found, "loraproxy_requests_total", endpoint="/completion", adapter="base", outcome="error") == 1
    assert of(found, "loraproxy_worker_deaths_total") == 1
    assert of(found, "loraproxy_worker_spawns_total") == 2
    assert of(found, "llamacpp:tokens_predicted_total") >= before
    assert {line["level"] for line in log_lines(talkative)} >= {"info", "error"}


def samples_now(server: Server) -> Samples:
    """Likewise, whatever is in flight."""
    families = text_string_to_metric_families(call(server, "GET", "/metrics")[2])
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def test_several_workers_have_one_set_of_metrics_that_keeps_what_ended_workers_counted(
    tmp_path: Path, model: Path
) -> None:
    arguments = [*character_arguments(), "--lora-mode", "graph", "--preload", "base", "--preload", "pirate"]
    body = {"prompt": "The harbour", "n_predict": 4, "ignore_eos": True}
    with running_proxy(tmp_path, arguments) as server:
        for name in ("base", "pirate"):
            assert call(server, "POST", "/completion", {**body, "model": name})[0] == 200
        found = scrape(server)
        assert of(found, "loraproxy_workers", state="ready") == 2
        assert of(found, "llamacpp:tokens_predicted_total") == 8
        first = call(server, "GET", "/workers")[2]["data"][0]["id"]
        assert call(server, "POST", f"/workers/{first}/drain")[0] == 202
        while of(found := scrape(server), "loraproxy_worker_stops_total") < 1:
            pass
        assert of(found, "llamacpp:tokens_predicted_total") == 8
        assert of(found, "loraproxy_worker_drains_total") >= 1
