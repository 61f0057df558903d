import asyncio
import json

import pytest
from standin import running, soon

from loraproxy.config import HttpConfig


async def sent(bench, body, path="/completion"):
    """The JSON that the worker received, and the answer's X-LoRA."""
    async with bench.post(path, body) as answer:
        assert answer.status == 200, await answer.text()
        return json.loads((await answer.json())["body"]), answer.headers["X-LoRA"]


@pytest.mark.parametrize(
    ("path", "body", "wire", "label"),
    [
        ("/completion", {"lora": "pirate"}, [{"id": 0, "scale": 1.0}], "pirate=1"),
        (
            "/completion",
            {"lora": {"robot": 0.5, "pirate": 2}},
            [{"id": 0, "scale": 2.0}, {"id": 1, "scale": 0.5}],
            None,
        ),
        ("/completion", {"lora": [{"id": 1, "scale": 0.25}]}, [{"id": 1, "scale": 0.25}], "robot=0.25"),
        ("/completion", {"adapter_id": "robot"}, [{"id": 1, "scale": 1.0}], "robot=1"),
        ("/completion", {"model": "base:robot"}, [{"id": 1, "scale": 1.0}], "robot=1"),
        ("/v1/chat/completions", {"model": "pirate"}, [{"id": 0, "scale": 1.0}], "pirate=1"),
        ("/lora/robot/v1/completions", {}, [{"id": 1, "scale": 1.0}], "robot=1"),
        ("/lora/robot/completions", {"lora": "none"}, None, ""),
        ("/completion", {"lora": []}, None, ""),
        ("/completion", {"model": "anything"}, None, ""),
    ],
)
async def test_the_worker_gets_the_resolved_set_whatever_selected_it(tmp_path, path, body, wire, label):
    async with running(tmp_path) as bench:
        received, shown = await sent(bench, {"prompt": "hi", **body}, path)
        assert received.get("lora") == wire
        assert shown == (label if label is not None else "pirate=2,robot=0.5")
        assert {key: received[key] for key in body if key != "lora"} == {k: v for k, v in body.items() if k != "lora"}
        assert bench.worker.received[-1][0] == path.removeprefix("/lora/robot")


async def test_a_request_for_the_base_model_is_forwarded_byte_for_byte(tmp_path):
    raw = b'{ "prompt" : "\\u00e9 \\ud800",\n "x": 1.50 }'
    async with running(tmp_path) as bench, bench.post("/completion", raw) as answer:
        assert answer.status == 200
        assert bench.worker.received == [("/completion", raw)]


async def test_each_event_is_passed_on_as_soon_as_the_worker_sends_it(tmp_path):
    async with running(tmp_path) as bench, bench.post("/completion", {"wish": "stream"}) as answer:
        for number in range(3):
            bench.worker.go_on.release()
            assert await soon(answer.content.readany()) == b'data: {"content":"%d"}\n\n' % number
        assert await soon(answer.content.read()) == b""
        assert answer.headers["Content-Type"] == "text/event-stream"
        assert answer.headers["X-Accel-Buffering"] == "no"
        assert answer.headers["X-LoRA"] == ""


async def test_an_error_of_the_worker_comes_back_unchanged(tmp_path):
    async with running(tmp_path) as bench, bench.post("/completion", {"wish": "refuse"}) as answer:
        assert answer.status == 400
        assert await answer.json() == {"error": {"code": 400, "message": "no", "type": "invalid_request_error"}}


@pytest.mark.parametrize("wish", ["hold", "stream"])
async def test_a_client_that_goes_away_cancels_its_request_on_the_worker(tmp_path, wish):
    async with running(tmp_path) as bench:
        request = asyncio.create_task(bench.client.post(bench.url + "/completion", json={"wish": wish}))
        await soon(bench.worker.arrived.acquire())
        if wish == "stream":
            (await soon(request)).close()
        else:
            request.cancel()
        await soon(bench.worker.cancelled.wait())
        async with bench.post("/completion", {}) as answer:
            assert answer.status == 200


async def test_requests_share_a_kept_connection_to_the_worker(tmp_path):
    async with running(tmp_path) as bench:
        for _ in range(5):
            await sent(bench, {"lora": "pirate"})
        assert len(bench.worker.connections) == 1


async def test_what_may_not_wait_any_more_is_refused_at_once_with_retry_after(tmp_path):
    async with running(tmp_path, HttpConfig(max_queue=1), slots=1) as bench:
        held = [asyncio.create_task(sent(bench, {"wish": "hold"})) for _ in range(2)]
        await soon(bench.worker.arrived.acquire())
        await soon(bench.worker.arrived.acquire())
        async with bench.post("/completion", {}) as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "1"
            assert (await answer.json())["error"] == {
                "code": 503,
                "message": "too many requests: 1 run and 1 wait; try again later",
                "type": "unavailable_error",
            }
        bench.worker.go_on.release()
        bench.worker.go_on.release()
        await soon(asyncio.gather(*held))
        await sent(bench, {})


async def test_what_generates_nothing_passes_through_even_when_the_queue_is_full(tmp_path):
    async with running(tmp_path, HttpConfig(max_queue=0), slots=1) as bench:
        held = asyncio.create_task(sent(bench, {"wish": "hold"}))
        await soon(bench.worker.arrived.acquire())
        async with bench.post("/lora/pirate/tokenize?x=1", {"content": "hi"}) as answer:
            assert await answer.json() == {"path": "/tokenize?x=1", "body": '{"content": "hi"}'}
        bench.worker.go_on.release()
        await soon(held)
