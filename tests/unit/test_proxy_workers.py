"""``/workers``, and requests over HTTP in front of keyed workers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from standin import Bench, StandIn, running, soon

from loraproxy.adapters.registry import Bound
from loraproxy.adapters.sets import BASE
from loraproxy.config import HttpConfig
from loraproxy.metrics import Metrics
from loraproxy.pool.backoff import Backoff
from loraproxy.pool.fleet import WorkerKind
from loraproxy.pool.keyed import KeyedPool
from loraproxy.pool.placement import Limits, Quantum


class KeyedStandIn(StandIn):
    """Runs one set; its requests' bodies must say the same."""

    has = BASE

    async def change(self, bound: Bound) -> None:
        self.has = bound.adapters


class KeyedHttpBench(Bench):
    """A proxy in front of at most two keyed stand-ins."""

    def _make_pool(self, metrics: Metrics, slots: int, max_queue: int, memory: int) -> Any:
        return KeyedPool(
            WorkerKind(self._make, slots),
            metrics,
            limits=Limits(max_workers=2, max_queue=max_queue),
            quantum=Quantum(leases=slots, seconds=0.01),
            backoff=Backoff(first=0.02, longest=0.1),
        )

    def _make(self) -> Any:
        self.workers.append(KeyedStandIn(self._folder / f"{len(self.workers)}.sock", self.may_start))
        return self.workers[-1]


def keyed(folder, **more):
    return running(folder, make=KeyedHttpBench, **more)


async def workers(bench) -> list[dict[str, Any]]:
    async with bench.get("/workers") as answer:
        assert answer.status == 200
        return (await answer.json())["data"]


async def test_the_shared_worker_is_the_only_one_and_takes_any_set(tmp_path):
    async with running(tmp_path) as bench:
        [worker] = await workers(bench)
        assert worker.pop("since") > 1e9
        assert worker == {
            "object": "worker",
            "id": 0,
            "state": "ready",
            "lora": None,
            "leases": 0,
            "waiting": 0,
            "pid": None,
            "restarts": 0,
            "last_error": None,
            "memory": 0,
        }
        async with bench.get("/metrics") as answer:
            assert 'loraproxy_workers{state="ready"} 1.0' in await answer.text()


async def until(condition):
    async def look():
        while not await condition():
            pass

    await soon(look())


async def test_another_worker_takes_the_place_of_a_shared_one_before_it_is_drained_and_no_request_is_refused(tmp_path):
    async with running(tmp_path) as bench, bench.post("/completion", {"wish": "stream"}) as stream:
        first = bench.worker
        bench.may_start.clear()
        for _ in range(2):
            async with bench.post("/workers/0/drain", {}) as answer:
                assert answer.status == 202
        await soon(bench.made.acquire())
        assert [(worker["id"], worker["state"]) for worker in await workers(bench)] == [(0, "ready"), (1, "starting")]
        async with bench.post("/completion", {}) as answer:
            assert answer.status == 200
        assert len(first.received) == 2
        bench.may_start.set()
        await soon(bench.worker.started.wait())
        async with bench.post("/completion", {}) as answer:
            assert answer.status == 200
        assert (len(first.received), len(bench.worker.received)) == (2, 1)
        assert [(w["id"], w["state"], w["leases"]) for w in await workers(bench)] == [
            (0, "draining", 1),
            (1, "ready", 0),
        ]
        for _ in range(3):
            first.go_on.release()
        assert (await soon(stream.content.read())).count(b"data: {") == 3
        await soon(first.stopped.wait())
        assert first.grace == 10
        [worker] = await workers(bench)
        assert (worker["id"], worker["restarts"], worker["last_error"]) == (1, 1, None)
        assert len(bench.workers) == 2


async def test_where_no_other_can_be_started_a_shared_worker_that_is_to_be_drained_stays(tmp_path):
    async with running(tmp_path) as bench:
        bench.broken_starts = 1
        async with bench.post("/workers/0/drain", {}) as answer:
            assert answer.status == 202
        await soon(bench.made.acquire())
        await soon(bench.worker.stopped.wait())
        async with bench.post("/completion", {}) as answer:
            assert answer.status == 200
        [worker] = await workers(bench)
        assert (worker["id"], worker["state"], worker["restarts"]) == (0, "ready", 0)
        assert "no memory" in worker["last_error"]


async def test_a_shared_worker_that_dies_while_another_starts_in_its_place_is_replaced(tmp_path):
    async with running(tmp_path) as bench:
        bench.may_start.clear()
        async with bench.post("/workers/0/drain", {}) as answer:
            assert answer.status == 202
        await soon(bench.made.acquire())
        bench.workers[0].die()
        await soon(bench.workers[0].stopped.wait())
        bench.may_start.set()
        async with bench.post("/completion", {}) as answer:
            assert answer.status == 200
        [worker] = await workers(bench)
        assert worker["id"] == 2


class CrampedBench(Bench):
    """There is no memory for two workers."""

    two_fit = False


async def test_without_memory_for_two_a_shared_worker_is_drained_first_and_requests_wait_for_the_next(tmp_path):
    async with (
        running(tmp_path, make=CrampedBench) as bench,
        bench.post("/completion", {"wish": "stream"}) as stream,
    ):
        first = bench.worker
        async with bench.post("/workers/0/drain", {}) as answer:
            shown = await answer.json()
            assert (answer.status, shown["state"], shown["leases"]) == (202, "draining", 1)
        waiting = [asyncio.create_task(bench.client.post(bench.url + "/completion", json={})) for _ in range(3)]

        async def all_wait() -> bool:
            return (await workers(bench))[0]["waiting"] == 3

        await until(all_wait)
        assert len(bench.workers) == 1
        for _ in range(3):
            first.go_on.release()
        assert (await soon(stream.content.read())).count(b"data: {") == 3
        assert [answer.status for answer in await soon(asyncio.gather(*waiting))] == [200] * 3
        assert first.stopped.is_set()
        assert (len(bench.workers), len(first.received), len(bench.worker.received)) == (2, 1, 3)


async def test_requests_that_wait_for_a_worker_are_bounded_and_end_with_the_server(tmp_path):
    http = HttpConfig(max_queue=1)
    async with (
        running(tmp_path, http, slots=1, make=CrampedBench) as bench,
        bench.post("/completion", {"wish": "stream"}),
    ):
        async with bench.post("/workers/0/drain", {}) as answer:
            assert answer.status == 202
        waiting = [asyncio.create_task(bench.client.post(bench.url + "/completion", json={})) for _ in range(3)]
        done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result().status for task in done] == [503]
        drain = asyncio.create_task(bench.pool.drain(10))
        for answer in await soon(asyncio.gather(*rest)):
            assert (answer.status, (await answer.json())["error"]["message"]) == (503, "the server is shutting down")
        drain.cancel()


async def test_a_worker_that_does_not_exist_cannot_be_drained(tmp_path):
    async with running(tmp_path) as bench:
        for name in ("7", "-1", "x", "9" * 5000):
            async with bench.post(f"/workers/{name}/drain", {}) as answer:
                assert answer.status == 404
                assert "there is no worker" in (await answer.json())["error"]["message"]


async def test_a_dead_shared_workers_last_words_are_shown(tmp_path):
    async with running(tmp_path) as bench:
        bench.worker.die()
        await soon(bench.made.acquire())
        await soon(bench.worker.started.wait())
        [worker] = await workers(bench)
        assert worker["last_error"] == "killed by SIGKILL\n  last words"
        async with bench.get("/metrics") as answer:
            text = await answer.text()
        assert "loraproxy_worker_deaths_total 1.0" in text
        assert "loraproxy_worker_spawns_total 2.0" in text


async def test_each_set_has_a_worker_of_its_own(tmp_path):
    async with keyed(tmp_path) as bench:
        streams = [await bench.post("/completion", {"lora": name, "wish": "stream"}) for name in ("pirate", "robot")]
        assert [stream.headers["X-LoRA"] for stream in streams] == ["pirate=1", "robot=1"]
        assert [worker["lora"] for worker in await workers(bench)] == ["pirate=1", "robot=1"]
        for worker in bench.workers:
            body = json.loads(worker.received[0][1])
            assert body["lora"] == worker.has.wire()
        for stream in streams:
            stream.close()


async def test_a_keyed_worker_that_dies_fails_its_own_streams_only(tmp_path):
    async with keyed(tmp_path) as bench:
        own = [await bench.post("/completion", {"lora": "pirate", "wish": "stream"}) for _ in range(3)]
        other = await bench.post("/completion", {"lora": "robot", "wish": "stream"})
        bench.workers[0].die()
        for stream in own:
            rest = await soon(stream.content.read())
            assert json.loads(rest.removeprefix(b"data: "))["error"]["code"] == 502
        for _ in range(3):
            bench.workers[1].go_on.release()
        assert (await soon(other.content.read())).count(b'"content"') == 3
        async with bench.post("/completion", {"lora": "pirate"}) as answer:
            assert answer.status == 200


async def test_a_request_that_its_worker_did_not_see_is_answered_by_another(tmp_path):
    async with keyed(tmp_path) as bench:
        async with bench.post("/completion", {"lora": "pirate"}) as answer:
            assert answer.status == 200
        bench.workers[0].connections.clear()
        await bench.workers[0].session.connector.close()
        bench.workers[0].session._connector = type(bench.workers[0].session.connector)(str(tmp_path / "nowhere"))
        async with bench.post("/completion", {"lora": "pirate"}) as answer:
            assert answer.status == 200
        assert [path for path, _ in bench.workers[0].received] == ["/completion"]
        assert [path for path, _ in bench.workers[1].received] == ["/completion"]


async def test_a_shared_worker_that_accepts_no_connection_gives_503_with_retry_after(tmp_path):
    async with running(tmp_path) as bench:
        await bench.worker._runner.sites.copy().pop().stop()
        async with bench.post("/completion", {}) as answer:
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) >= 1


async def test_beyond_the_queue_a_request_for_a_keyed_worker_gets_503_with_retry_after(tmp_path):
    async with keyed(tmp_path, http=HttpConfig(max_queue=1), slots=1) as bench:
        held = [await bench.post("/completion", {"lora": name, "wish": "stream"}) for name in ("pirate", "robot")]
        waiting = asyncio.create_task(bench.client.post(bench.url + "/completion", json={"lora": {"pirate": 0.5}}))
        while not any(worker["state"] == "draining" for worker in await workers(bench)):
            pass
        async with bench.post("/completion", {"lora": {"pirate": 0.5}}) as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "1"
        for worker in bench.workers:
            for _ in range(3):
                worker.go_on.release()
        for stream in held:
            await soon(stream.content.read())
        answer = await soon(waiting)
        assert answer.status == 200
        assert answer.headers["X-LoRA"] == "pirate=0.5"


@pytest.mark.parametrize("make", [Bench, KeyedHttpBench])
async def test_500_clients_that_leave_in_the_middle_of_their_streams_leave_nothing(tmp_path, make):
    async with running(tmp_path, make=make) as bench:

        async def leave(name: str) -> None:
            async with bench.post("/completion", {"lora": name, "wish": "stream"}) as stream:
                assert stream.status == 200

        for number in range(125):
            await soon(asyncio.gather(*(leave(("pirate", "robot")[number % 2]) for _ in range(4))))
        while bench.pool.in_flight:
            await workers(bench)
        async with bench.get("/adapters") as answer:
            assert [adapter["leases"] for adapter in (await answer.json())["data"]] == [0, 0]
        async with bench.post("/completion", {"lora": "pirate"}) as answer:
            assert answer.status == 200


async def test_a_keyed_worker_is_drained_over_http(tmp_path):
    async with keyed(tmp_path) as bench:
        async with bench.post("/workers/0/drain", {}) as answer:
            assert answer.status == 202
        await soon(bench.workers[0].stopped.wait())
        async with bench.post("/completion", {}) as answer:
            assert answer.status == 200
        assert [worker["id"] for worker in await workers(bench)] == [1]


async def test_adapters_are_shown_as_loaded_where_a_keyed_worker_has_them(tmp_path):
    async with keyed(tmp_path) as bench:
        async with bench.post("/completion", {"lora": "pirate"}) as answer:
            assert answer.status == 200
        async with bench.get("/adapters") as answer:
            states = {adapter["name"]: adapter["state"] for adapter in (await answer.json())["data"]}
        assert states == {"pirate": "resident", "robot": "registered"}
