"""Keyed workers that die, cannot start or cannot run a set; idle ones; versions that are replaced."""

from __future__ import annotations

import asyncio

import pytest
from keyed_bench import ADAPTER, OWN, SHARED, KeyedBench, settle
from standin import soon

from loraproxy.errors import (
    AdapterChanged,
    Conflict,
    InvalidAdapterFile,
    NotFound,
    NotSupported,
    ServerError,
    StartFailed,
    Unavailable,
    WorkerFailed,
    WorkerUnreached,
)
from loraproxy.pool.backoff import Backoff
from loraproxy.pool.troubles import Patience

BACKOFF = Backoff(first=1.0, longest=8.0, healthy_after=60.0)
PATIENCE = Patience(failures=3, cool_down=30.0)


def bench_with(**limits) -> KeyedBench:
    return KeyedBench(backoff=BACKOFF, patience=PATIENCE, **limits)


# -- deaths ----------------------------------------------------------------------------------------------------


async def test_a_worker_that_dies_fails_its_own_requests_only_and_is_replaced_after_the_backoff():
    async with bench_with(max_workers=2) as bench:
        dying, other = await bench.served("a"), await bench.served("b")
        bench.backends[0].die("error: out of memory")
        await settle()
        waiting = bench.request("a")
        await settle()
        assert bench.sets() == {1: "b=1 ready"}
        assert bench.backends[0].stopped.is_set()
        dying.fails_with = bench.pool.broken()
        dying.may_end.set()
        with pytest.raises(WorkerFailed, match="ended while it worked on this request"):
            await soon(dying.task)
        assert not waiting.running.is_set()
        await bench.clock.advance(1)
        await soon(waiting.running.wait())
        assert bench.sets() == {1: "b=1 ready", 2: "a=1 ready"}
        shown = bench.pool.workers()[1]
        assert (shown.restarts, shown.last_error) == (1, "exit code 1: out of memory")
        assert bench.pool.restarts == 1
        assert bench.metric("loraproxy_worker_deaths_total") == 1
        await other.end()


async def test_each_death_doubles_the_wait_and_a_time_of_health_forgets_it():
    async with bench_with(max_workers=1) as bench:
        for wait in (1, 2, 4, 8, 8):
            bench.request("a").may_end.set()
            await settle()
            bench.backends[-1].die()
            await settle()
            request = bench.request("a")
            await settle()
            await bench.clock.advance(wait - 0.1)
            assert not request.running.is_set()
            await bench.clock.advance(0.1)
            await soon(request.running.wait())
            await request.end()
        await bench.clock.advance(60)
        bench.backends[-1].die()
        await settle()
        request = bench.request("a")
        await settle()
        await bench.clock.advance(1)
        await soon(request.running.wait())


async def test_a_set_under_which_workers_die_again_and_again_before_they_are_ready_gets_503_with_their_last_words():
    async with bench_with(max_workers=2) as bench:
        bench.problems["b"] = ["dies"] * 4
        waiting = bench.request("b")
        await settle()
        await bench.clock.advance(1)
        await bench.clock.advance(2)
        with pytest.raises(Unavailable, match=r"no worker can run b=1: .*no such tensor \(3 times in a row\)") as error:
            await soon(waiting.task)
        assert error.value.retry_after == 30
        spawned = len(bench.backends)
        await bench.clock.advance(10)
        with pytest.raises(Unavailable, match="no such tensor") as error:
            await soon(bench.request("b").task)
        assert error.value.retry_after == 20
        await soon(bench.use("a"))
        await bench.clock.advance(20)
        again = bench.request("b")
        with pytest.raises(Unavailable, match="4 times"):
            await soon(again.task)
        await bench.clock.advance(30)
        await soon(bench.use("b"))
        assert len(bench.backends) - spawned <= 3


async def test_failures_before_a_worker_was_ready_are_forgotten_when_one_is():
    async with bench_with(max_workers=1) as bench:
        for _ in range(3):
            bench.problems["b"] = ["dies"] * 2
            request = bench.request("b")
            await settle()
            await bench.clock.advance(20)
            await soon(request.running.wait())
            await request.end()
            await bench.use("a")


async def test_when_all_workers_are_gone_another_is_started_and_meanwhile_health_is_503():
    async with bench_with() as bench:
        bench.may_start.clear()
        bench.backends[0].die()
        await settle()
        for ask in (bench.pool.check_ready, bench.pool.reach):
            with pytest.raises(Unavailable, match="are being replaced"):
                ask()
        await bench.clock.advance(1)
        bench.may_start.set()
        await settle()
        bench.pool.check_ready()
        assert bench.sets() == {1: "base ready"}


async def test_a_worker_that_is_being_changed_is_still_reached():
    async with bench_with() as bench:
        bench.may_change.clear()
        bench.request("a")
        await settle()
        assert bench.sets() == {0: "a=1 starting"}
        bench.pool.check_ready()
        assert bench.pool.reach().backend is bench.backends[0]


async def test_a_first_start_that_fails_is_not_tried_again():
    bench = bench_with()
    bench.starts_fail = True
    with pytest.raises(StartFailed, match="no memory"):
        async with bench:
            pass
    assert len(bench.backends) == 1
    await bench.pool.close(0)


async def test_a_start_without_room_for_one_worker_fails():
    bench = bench_with(memory_budget=SHARED)
    with pytest.raises(StartFailed, match="--memory-budget"):
        async with bench:
            pass
    await bench.pool.close(0)


async def test_before_the_start_is_over_requests_are_told_that_the_model_loads():
    bench = bench_with()
    bench.may_start.clear()
    start = asyncio.create_task(bench.pool.start())
    await settle()
    with pytest.raises(Unavailable, match="Loading model"):
        await soon(bench.request().task)
    bench.may_start.set()
    await soon(start)
    await bench.pool.close(0)


async def test_a_close_in_the_middle_of_a_start_ends_the_worker():
    bench = bench_with()
    bench.may_start.clear()
    start = asyncio.create_task(bench.pool.start())
    await settle()
    await soon(bench.pool.close(0))
    assert bench.backends[0].stopped.is_set()
    with pytest.raises(StartFailed, match="the server was stopped"):
        await soon(start)


async def test_a_close_that_is_given_up_is_followed_by_one_without_grace():
    bench = bench_with()
    await bench.pool.start()
    bench.may_stop.clear()
    patient = asyncio.create_task(bench.pool.close(10))
    await settle()
    assert bench.backends[0].grace == 10
    patient.cancel()
    await settle()
    bench.may_stop.set()
    await soon(bench.pool.close(0))
    assert bench.backends[0].grace == 0


async def test_a_request_that_no_worker_saw_is_taken_elsewhere():
    async with bench_with(slots=2, max_workers=2) as bench:
        other = await bench.served("a")
        with pytest.raises(WorkerUnreached):
            async with bench.pool.lease(bench.bound("a")):
                raise WorkerUnreached("the worker does not accept connections")
        second = await bench.served("a")
        assert second.worker is bench.backends[1]
        await other.end()
        assert bench.sets() == {1: "a=1 ready"}


@pytest.mark.parametrize("steps", range(12))
async def test_a_worker_that_is_known_to_have_ended_is_not_handed_out_whenever_that_happened(steps):
    async with bench_with(slots=1, max_workers=1) as bench:
        first = await bench.served("a")
        waiting = bench.request("a")
        await settle()
        bench.backends[0].die()
        for _ in range(steps):
            await asyncio.sleep(0)
        first.may_end.set()
        await settle()
        waiting.may_end.set()
        await bench.clock.advance(1)
        await soon(waiting.task)


# -- sets that cannot be run -----------------------------------------------------------------------------------


async def test_a_set_that_is_refused_reaches_those_that_wait_and_the_worker_keeps_what_it_had(tmp_path):
    (tmp_path / "b").write_text("broken")
    async with KeyedBench(tmp_path, max_workers=1) as bench:
        await bench.use("a")
        bench.problems["b"] = [InvalidAdapterFile("the graph has no such place")]
        for request in [bench.request("b"), bench.request("b")]:
            with pytest.raises(InvalidAdapterFile, match="no such place"):
                await soon(request.task)
        with pytest.raises(InvalidAdapterFile, match="no such place"):
            await soon(bench.request("b", scale=0.5).task)
        assert bench.sets() == {0: "a=1 ready"}
        assert bench.log == ["0 start", "0 change a", "0 change b"], "it was not tried again"
        assert bench.pool.residency.failure(bench.versions["b"]) == "the graph has no such place"
        (tmp_path / "b").write_text("whole again")
        await soon(bench.use("b"))
        assert bench.pool.residency.failure(bench.versions["b"]) == ""


async def test_a_file_that_changed_since_it_was_registered_is_the_requests_error(tmp_path):
    async with KeyedBench(tmp_path, max_workers=1) as bench:
        bench.problems["a"] = [AdapterChanged("the file changed")]
        with pytest.raises(AdapterChanged):
            await soon(bench.request("a").task)
        await settle()
        assert bench.sets() == {0: "base ready"}


async def test_a_worker_that_has_not_noticed_that_its_client_left_is_given_time_before_it_changes():
    async with bench_with(max_workers=1) as bench:
        bench.problems["a"] = [Conflict("a request still runs")] * 3
        request = bench.request("a")
        await settle()
        await bench.clock.advance(1)
        await soon(request.running.wait())
        assert bench.log == ["0 start"] + ["0 change a"] * 4


async def test_a_worker_on_which_something_runs_for_ever_is_replaced():
    async with bench_with(max_workers=1) as bench:
        bench.problems["a"] = [Conflict("a request still runs")] * 15
        request = bench.request("a")
        await settle()
        await bench.clock.advance(20)
        await soon(request.running.wait())
        assert request.worker is bench.backends[1]


# -- idle workers ----------------------------------------------------------------------------------------------


async def test_idle_workers_end_the_least_recently_used_first_and_the_last_one_stays():
    async with bench_with(max_workers=3, idle_timeout=60) as bench:
        requests = [await bench.served(name) for name in "abc"]
        for number in (1, 0, 2):
            await requests[number].end()
            await bench.clock.advance(10)
        await bench.clock.advance(35)
        assert bench.sets() == {0: "a=1 ready", 2: "c=1 ready"}
        await bench.clock.advance(10)
        assert bench.sets() == {2: "c=1 ready"}
        await bench.clock.advance(1000)
        assert bench.sets() == {2: "c=1 ready"}
        assert bench.backends[1].grace == 10


async def test_a_worker_that_is_used_does_not_end():
    async with bench_with(max_workers=2, idle_timeout=60) as bench:
        await bench.served("a")
        b = await bench.served("b")
        await b.end()
        for _ in range(5):
            await bench.clock.advance(50)
            await bench.use("b")
        assert bench.sets() == {0: "a=1 ready", 1: "b=1 ready"}


# -- sets that are kept warm -----------------------------------------------------------------------------------


async def test_preloaded_sets_are_there_from_the_start_and_do_not_end():
    bench = bench_with(max_workers=3, idle_timeout=60)
    bench.keep_warm("a", "b")
    async with bench:
        assert bench.sets() == {0: "a=1 ready", 1: "b=1 ready"}
        await bench.use("c")
        await bench.clock.advance(100)
        assert bench.sets() == {0: "a=1 ready", 1: "b=1 ready"}


async def test_a_preloaded_set_whose_worker_dies_is_started_again():
    bench = bench_with(max_workers=3)
    bench.keep_warm("a")
    async with bench:
        bench.backends[0].die()
        await settle()
        assert bench.sets() == {}
        await bench.clock.advance(1)
        assert bench.sets() == {1: "a=1 ready"}


async def test_a_preloaded_set_is_evicted_only_where_nothing_else_can_be_and_comes_back():
    bench = bench_with(max_workers=2, idle_timeout=60)
    bench.keep_warm("a")
    async with bench:
        await bench.use("b")
        await bench.use("c")
        assert bench.sets() == {0: "a=1 ready", 1: "c=1 ready"}
        c, d = await bench.served("c"), await bench.served("d")
        assert bench.sets() == {0: "d=1 ready", 1: "c=1 ready"}
        await d.end()
        await bench.clock.advance(61)
        assert bench.sets() == {0: "a=1 ready", 1: "c=1 ready"}
        await c.end()


async def test_a_preloaded_set_that_cannot_be_run_fails_the_start():
    bench = bench_with(max_workers=2)
    bench.keep_warm("a", "b")
    bench.problems["b"] = [InvalidAdapterFile("no such place")]
    with pytest.raises(StartFailed, match="no such place"):
        async with bench:
            pass
    await bench.pool.close(0)


async def test_a_preloaded_set_that_cannot_be_run_later_is_not_tried_over_and_over(tmp_path):
    bench = KeyedBench(tmp_path, max_workers=3)
    async with bench:
        bench.problems["b"] = [InvalidAdapterFile("no such place")] * 100
        bench.keep_warm("b")
        await bench.use("a")
        await bench.clock.advance(100)
        assert len(bench.log) <= 5


async def test_a_set_that_is_to_be_kept_warm_from_now_on_gets_a_worker_without_any_request():
    bench = bench_with(max_workers=2)
    bench.keep_warm("a")
    async with bench:
        bench.keep_warm("b")
        await bench.clock.advance(10)
        assert bench.sets() == {0: "a=1 ready", 1: "b=1 ready"}


# -- versions that are replaced, workers that are drained by hand ----------------------------------------------


async def test_a_retired_version_leaves_when_its_last_request_has_ended():
    async with bench_with(max_workers=2) as bench:
        request = await bench.served("a")
        retire = asyncio.create_task(bench.pool.retire(bench.versions["a"]))
        await settle()
        assert not retire.done()
        assert bench.pool.leases(bench.versions["a"]) == 1
        await request.end()
        await soon(retire)
        assert bench.sets() == {0: "base ready"}
        assert bench.log == ["0 start", "0 change a", "0 change base"]
        assert bench.pool.residency.state(bench.versions["a"]) == "registered"


async def test_a_retired_version_that_waits_is_still_served():
    async with bench_with(slots=1, max_workers=1) as bench:
        first, second = await bench.served("b"), bench.request("a")
        await settle()
        retire = asyncio.create_task(bench.pool.retire(bench.versions["a"]))
        await settle()
        await first.end()
        await soon(second.running.wait())
        await second.end()
        await soon(retire)
        assert bench.log == ["0 start", "0 change b", "0 change a", "0 change base"]


async def test_a_worker_that_cannot_be_given_the_base_model_again_ends_with_the_retired_version():
    async with bench_with(max_workers=2) as bench:
        await bench.use("a")
        bench.problems["base"] = [ServerError("no")]
        await soon(bench.pool.retire(bench.versions["a"]))
        assert bench.sets() in ({}, {1: "base ready"})
        await bench.clock.advance(1)
        assert bench.sets() == {1: "base ready"}


async def test_a_backend_that_refuses_the_base_model_is_not_asked_over_and_over():
    async with bench_with(max_workers=2) as bench:
        await bench.use("a")
        bench.problems["base"] = [NotSupported("no such set")] * 100
        await soon(bench.pool.retire(bench.versions["a"]))
        assert bench.log[:4] == ["0 start", "0 change a", "0 change base", "0 stop"]


async def test_a_worker_that_is_drained_by_hand_finishes_ends_and_is_replaced_when_it_is_wanted():
    async with bench_with(max_workers=1) as bench:
        request = await bench.served("a")
        shown = bench.pool.drain_worker(0)
        assert (shown.state.value, shown.leases, shown.adapters) == ("draining", 1, "a=1")
        waiting = bench.request("a")
        await settle()
        assert not waiting.running.is_set()
        await request.end()
        await soon(waiting.running.wait())
        assert waiting.worker is bench.backends[1]
        with pytest.raises(NotFound, match="no worker 0; there are: 1"):
            bench.pool.drain_worker(0)


async def test_a_worker_that_is_drained_while_it_starts_ends_when_it_is_ready():
    async with bench_with(max_workers=2) as bench:
        await bench.served("a")
        bench.may_start.clear()
        waiting = bench.request("b")
        await settle()
        bench.pool.drain_worker(1)
        bench.may_start.set()
        await soon(waiting.running.wait())
        assert waiting.worker is bench.backends[2]


async def test_what_is_loaded_is_told_by_version():
    async with bench_with(max_workers=1) as bench:
        bench.may_change.clear()
        request = bench.request("a")
        await settle()
        adapters = bench.pool.residency
        assert adapters.state(bench.versions["a"]) == "loading"
        bench.may_change.set()
        await soon(request.running.wait())
        assert adapters.state(bench.versions["a"]) == "resident"
        assert adapters.nbytes == ADAPTER
        assert bench.pool.workers()[0].memory == OWN + ADAPTER
        assert bench.pool.last_used(bench.versions["a"]) is not None
        assert bench.pool.last_used(bench.versions["b"]) is None
