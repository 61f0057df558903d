"""A worker that dies, does not come back at once, or is told to stop."""

import asyncio
import json

import pytest
from standin import running, soon

from loraproxy.errors import StartFailed
from loraproxy.pool.backoff import Backoff


async def status_of(bench, path="/health"):
    async with bench.get(path) as answer:
        return answer.status


async def test_a_request_whose_worker_dies_before_it_answers_fails_with_502(tmp_path):
    async with running(tmp_path) as bench:
        request = asyncio.create_task(bench.client.post(bench.url + "/completion", json={"wish": "hold"}))
        await soon(bench.worker.arrived.acquire())
        bench.worker.die()
        answer = await soon(request)
        assert answer.status == 502
        assert (await answer.json())["error"] == {
            "code": 502,
            "message": "the worker ended while it worked on this request; try again",
            "type": "server_error",
        }


async def test_a_stream_whose_worker_dies_ends_with_an_error_event(tmp_path):
    async with running(tmp_path) as bench, bench.post("/completion", {"wish": "stream"}) as answer:
        bench.worker.go_on.release()
        assert b'"content":"0"' in await soon(answer.content.readany())
        bench.worker.die()
        rest = await soon(answer.content.read())
        assert rest.startswith(b"data: ")
        assert rest.endswith(b"\n\n")
        assert json.loads(rest.removeprefix(b"data: "))["error"]["code"] == 502


async def test_after_a_dead_worker_requests_wait_for_the_next_one(tmp_path):
    async with running(tmp_path) as bench:
        bench.may_start.clear()
        bench.worker.die()
        await soon(bench.worker.stopped.wait())
        async with bench.get("/health") as answer:
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) >= 1
            assert (await answer.json())["error"]["message"] == (
                "the worker ended and is being replaced; try again later"
            )
        waiting = [asyncio.create_task(bench.client.post(bench.url + "/completion", json={})) for _ in range(3)]
        while bench.pool.in_flight < 3:
            await status_of(bench)
        async with bench.get("/metrics") as answer:
            assert answer.status == 200
            assert "loraproxy_worker_restarts 0.0" in await answer.text()
        await soon(bench.made.acquire())
        bench.may_start.set()
        assert [answer.status for answer in await soon(asyncio.gather(*waiting))] == [200] * 3
        assert await status_of(bench) == 200
        async with bench.get("/metrics") as answer:
            assert "loraproxy_worker_restarts 1.0" in await answer.text()


async def test_a_request_that_waits_for_its_adapter_when_the_worker_dies_is_answered_by_the_next(tmp_path):
    async with running(tmp_path, memory=1000) as bench:
        first = bench.worker
        holding = await bench.client.post(bench.url + "/completion", json={"lora": "pirate", "wish": "stream"})
        waiting = asyncio.create_task(bench.client.post(bench.url + "/completion", json={"lora": "robot"}))
        while not bench.pool.residency.waiting:
            await status_of(bench)
        first.die()
        answer = await soon(waiting)
        assert (answer.status, len(bench.worker.received)) == (200, 1)
        assert b'"code": 502' in await soon(holding.content.read())


async def test_a_replacement_that_fails_to_start_is_tried_again_and_requests_are_told_why_it_failed(tmp_path):
    async with running(tmp_path) as bench:
        bench.may_start.clear()
        bench.broken_starts = 2
        bench.worker.die()
        await soon(bench.made.acquire())
        waiting = asyncio.create_task(bench.client.post(bench.url + "/completion", json={}))
        while not bench.pool.in_flight:
            await status_of(bench)
        bench.may_start.set()
        answer = await soon(waiting)
        assert answer.status == 503
        assert int(answer.headers["Retry-After"]) >= 1
        assert "exit code 1: no memory" in (await answer.json())["error"]["message"]
        for _ in range(2):
            await soon(bench.made.acquire())
        await soon(bench.worker.started.wait())
        assert len(bench.workers) == 4
        assert await status_of(bench) == 200


def test_the_wait_doubles_with_each_failure_up_to_a_limit():
    backoff = Backoff(first=0.5, longest=30)
    assert [backoff.delay(n) for n in (1, 2, 3, 8, 1000)] == [0.5, 1, 2, 30, 30]


async def test_a_first_start_that_fails_is_not_tried_again(tmp_path):
    async with running(tmp_path, started=False) as bench:
        bench.worker.fails_to_start = True
        with pytest.raises(StartFailed, match="exit code 1: no memory"):
            await bench.pool.start()
        assert len(bench.workers) == 1


async def test_before_the_worker_is_ready_everything_answers_loading_model(tmp_path):
    async with running(tmp_path, started=False, keys=("k",)) as bench:
        for path in ("/health", "/v1/models", "/metrics", "/nowhere"):
            async with bench.get(path) as answer:
                assert answer.status == 503
                assert (await answer.json())["error"] == {
                    "code": 503,
                    "message": "Loading model",
                    "type": "unavailable_error",
                }


async def test_a_drain_refuses_new_requests_and_lets_those_in_flight_finish(tmp_path):
    async with running(tmp_path) as bench, bench.post("/completion", {"wish": "stream"}) as answer:
        drain = asyncio.create_task(bench.pool.drain(10))
        await asyncio.sleep(0)
        async with bench.post("/completion", {}) as refused:
            assert refused.status == 503
            assert (await refused.json())["error"]["message"] == "the server is shutting down"
        for _ in range(3):
            bench.worker.go_on.release()
        assert (await soon(answer.content.read())).count(b"data: ") == 3
        assert await soon(drain) is True


async def test_a_drain_that_takes_too_long_ends_and_what_is_left_gets_an_error(tmp_path):
    async with running(tmp_path) as bench, bench.post("/completion", {"wish": "stream"}) as answer:
        assert await soon(bench.pool.drain(0)) is False
        await bench.pool.close(0)
        rest = await soon(answer.content.read())
        assert json.loads(rest.removeprefix(b"data: "))["error"] == {
            "code": 503,
            "message": "the server is shutting down",
            "type": "unavailable_error",
        }


async def test_leases_are_counted_by_adapter_set(tmp_path):
    async with running(tmp_path) as bench:
        requests = [
            asyncio.create_task(bench.client.post(bench.url + "/completion", json={"wish": "hold", "lora": name}))
            for name in ("pirate", "pirate", "robot")
        ]
        for _ in requests:
            await soon(bench.worker.arrived.acquire())
        worker = bench.pool.reach()
        assert sorted(worker.leases.values()) == [1, 2]
        assert bench.pool.in_flight == worker.in_flight == 3
        for _ in requests:
            bench.worker.go_on.release()
        for answer in await soon(asyncio.gather(*requests)):
            await answer.read()
        assert not worker.leases
        assert bench.pool.in_flight == 0
