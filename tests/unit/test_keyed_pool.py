"""Keyed workers: where a request is placed, whose turn it is, and that a worker is drained before it is changed."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from keyed_bench import ADAPTER, OWN, SHARED, KeyedBench, Request, settle
from standin import soon

from loraproxy.errors import InvalidRequest, Unavailable
from loraproxy.pool.placement import Quantum

# -- placement -------------------------------------------------------------------------------------------------


async def test_the_pool_starts_with_one_worker_that_has_the_base_model():
    async with KeyedBench() as bench:
        assert bench.sets() == {0: "base ready"}
        assert bench.log == ["0 start"]
        assert bench.pool.reach().backend is bench.backends[0]


async def test_a_worker_that_has_the_set_is_used_as_it_is():
    async with KeyedBench() as bench:
        await bench.use("a")
        await bench.use("a")
        assert bench.log == ["0 start", "0 change a"]


async def test_an_idle_worker_is_changed_before_another_is_started():
    async with KeyedBench(max_workers=4) as bench:
        await bench.use("a")
        await bench.use("b")
        assert bench.log == ["0 start", "0 change a", "0 change b"]


async def test_of_the_idle_workers_the_least_recently_used_is_changed():
    async with KeyedBench(max_workers=2) as bench:
        a, b = await bench.served("a"), await bench.served("b")
        assert bench.sets() == {0: "a=1 ready", 1: "b=1 ready"}
        await a.end()
        await bench.clock.advance(1)
        await b.end()
        await bench.clock.advance(1)
        await bench.use("a")
        await bench.clock.advance(1)
        await bench.use("c")
        assert bench.sets() == {0: "a=1 ready", 1: "c=1 ready"}


async def test_a_new_worker_is_started_where_all_are_busy_and_no_more_than_the_limit():
    async with KeyedBench(max_workers=2) as bench:
        for name in ("a", "b"):
            await bench.served(name)
        waiting = bench.request("c")
        await settle()
        assert not waiting.running.is_set()
        assert bench.sets() == {0: "a=1 ready", 1: "b=1 ready"}
        assert bench.metric("loraproxy_worker_spawns_total") == 2


async def test_two_scales_of_one_adapter_are_two_sets():
    async with KeyedBench(max_workers=2) as bench:
        await bench.served("a")
        other = bench.request("a", scale=0.5)
        await soon(other.running.wait())
        assert bench.sets() == {0: "a=1 ready", 1: "a=0.5 ready"}


async def test_a_set_gets_another_worker_where_its_slots_are_taken():
    async with KeyedBench(slots=2, max_workers=2) as bench:
        requests = [bench.request("a") for _ in range(4)]
        for request in requests:
            await soon(request.running.wait())
        assert [len(backend.running) for backend in bench.backends] == [2, 2]


async def test_as_many_workers_are_started_as_those_that_wait_need():
    async with KeyedBench(slots=2, max_workers=4) as bench:
        bench.may_start.clear()
        for _ in range(5):
            bench.request("a")
        await settle()
        assert len(bench.backends) == 3
        bench.may_start.set()


async def test_a_new_worker_must_fit_the_memory_where_the_base_file_counts_once():
    async with KeyedBench(max_workers=4, memory_budget=SHARED + 2 * (OWN + ADAPTER)) as bench:
        await bench.served("a")
        await bench.served("b")
        bench.request("c")
        await settle()
        assert len(bench.backends) == 2
        assert [worker.memory for worker in bench.pool.workers()] == [OWN + ADAPTER] * 2


async def test_idle_workers_end_to_make_room_for_a_set_that_needs_more():
    async with KeyedBench(max_workers=4, memory_budget=SHARED + 2 * OWN + 150) as bench:
        a, b = await bench.served("a"), await bench.served("b")
        await a.end()
        await b.end()
        await bench.use("big")
        assert bench.sets() == {0: "big=1 ready"}, "changing one of them was not enough"
        assert bench.log[-2:] == ["1 stop", "0 change big"]


async def test_no_more_idle_workers_end_than_a_set_needs():
    async with KeyedBench(max_workers=4, memory_budget=SHARED + 3 * OWN + 60) as bench:
        requests = [await bench.served(name) for name in "abc"]
        for request in requests:
            await request.end()
        await bench.use("big")
        assert bench.sets() == {0: "big=1 ready", 2: "c=1 ready"}


async def test_the_memory_for_a_set_is_kept_while_a_worker_is_drained_for_it():
    async with KeyedBench(slots=1, max_workers=3, memory_budget=SHARED + 2 * OWN + 150) as bench:
        first = await bench.served("a")
        big = bench.request("big")
        await settle()
        await bench.clock.advance(3)
        assert bench.sets() == {0: "a=1 draining"}
        other = bench.request("b")
        await settle()
        assert not other.running.is_set(), "there would be no room for both"
        await first.end()
        await soon(big.running.wait())


async def test_a_busy_worker_is_drained_where_memory_is_not_what_lacks():
    async with KeyedBench(slots=1, max_workers=1, memory_budget=10 * SHARED) as bench:
        first, second = await bench.served("a"), bench.request("b")
        await settle()
        await bench.clock.advance(3)
        await first.end()
        await soon(second.running.wait())


async def test_a_set_that_never_fits_the_memory_is_refused():
    async with KeyedBench(memory_budget=SHARED + OWN + ADAPTER) as bench:
        with pytest.raises(InvalidRequest, match=r"big=1 needs more memory .*--memory-budget"):
            await soon(bench.request("big").task)


# -- drain before change ---------------------------------------------------------------------------------------


async def test_a_busy_worker_is_drained_before_its_set_changes_and_the_log_says_so(caplog):
    caplog.set_level("INFO", logger="loraproxy.pool.worker")
    async with KeyedBench(max_workers=1) as bench:
        first = await bench.served("a")
        second = bench.request("b")
        await settle()
        await bench.clock.advance(2)
        assert bench.sets() == {0: "a=1 draining"}
        assert not second.running.is_set()
        assert bench.log == ["0 start", "0 change a"], "nothing changes under the request"
        await first.end()
        await soon(second.running.wait())
        assert bench.log == ["0 start", "0 change a", "0 change b"]
    moves = [record.getMessage() for record in caplog.records if "worker_state" in record.getMessage()]
    shown = [[part.partition("=")[2] for part in move.split()[2:5]] for move in moves]
    assert shown == [
        ["base", "none", "starting"],
        ["base", "starting", "ready"],
        ["base", "ready", "draining"],
        ["base", "draining", "starting"],
        ["a=1", "starting", "ready"],
        ["a=1", "ready", "draining"],
        ["a=1", "draining", "starting"],
        ["b=1", "starting", "ready"],
        ["b=1", "ready", "stopped"],
    ]


async def test_a_draining_worker_takes_no_more_requests_of_its_own_set():
    async with KeyedBench(slots=2, max_workers=1) as bench:
        first = await bench.served("a")
        other = bench.request("b")
        await settle()
        await bench.clock.advance(2)
        late = bench.request("a")
        await settle()
        assert not late.running.is_set()
        await first.end()
        await soon(other.running.wait())
        assert not late.running.is_set()
        await other.end()
        await soon(late.running.wait())


async def test_a_worker_goes_on_with_its_set_where_nobody_waits_for_another_any_more():
    async with KeyedBench(slots=2, max_workers=1) as bench:
        await bench.served("a")
        other = bench.request("b")
        await settle()
        await bench.clock.advance(2)
        late = bench.request("a")
        await settle()
        other.task.cancel()
        await soon(late.running.wait())
        assert bench.sets() == {0: "a=1 ready"}
        assert bench.log == ["0 start", "0 change a"]


async def test_a_set_that_finds_an_idle_worker_no_longer_needs_the_one_that_is_drained_for_it():
    async with KeyedBench(slots=1, max_workers=2) as bench:
        one, two = await bench.served("a"), await bench.served("c")
        waiting = bench.request("b")
        await settle()
        await bench.clock.advance(2)
        drained = next(i for i, text in bench.sets().items() if text.endswith("draining"))
        other = two if drained == 0 else one
        await other.end()
        await soon(waiting.running.wait())
        assert "draining" not in "".join(bench.sets().values())


# -- fairness --------------------------------------------------------------------------------------------------


async def test_a_flood_for_one_set_does_not_hold_up_one_request_for_another():
    async with KeyedBench(slots=4, max_workers=1, quantum=Quantum(leases=4, seconds=1e9)) as bench:
        order: list[str] = []
        flood = [asyncio.create_task(_brief(bench, "a", order)) for _ in range(100)]
        await settle_once()
        flood += [asyncio.create_task(_brief(bench, "a", order)) for _ in range(100)]
        before = len(order)
        one = asyncio.create_task(_brief(bench, "b", order))
        await soon(asyncio.gather(one, *flood))
        assert order.index("b") - before <= 4 + 4, "its turn comes after a quantum and what was running"
        assert order.count("a") == 200


async def settle_once() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


async def _brief(bench: KeyedBench, names: str, order: list[str]) -> None:
    async with bench.pool.lease(bench.bound(names)):
        order.append(names)
        await asyncio.sleep(0)


async def test_floods_for_several_sets_take_turns():
    async with KeyedBench(slots=2, max_workers=1, quantum=Quantum(leases=4, seconds=1e9)) as bench:
        order: list[str] = []
        names = ("a", "b", "c")
        tasks = [asyncio.create_task(_brief(bench, name, order)) for name in names for _ in range(40)]
        await soon(asyncio.gather(*tasks))
        turns = [(order[i], i) for i in range(len(order)) if i == 0 or order[i] != order[i - 1]]
        lengths = [after - at for (_, at), (_, after) in itertools.pairwise(turns)]
        assert max(lengths[:-3]) <= 4 + 2
        assert [name for name, _ in turns[:6]] == ["a", "b", "c", "a", "b", "c"]


async def test_requests_of_one_set_are_served_in_order():
    async with KeyedBench(slots=1, max_workers=1) as bench:
        order: list[int] = []

        async def request(number: int) -> None:
            async with bench.pool.lease(bench.bound("a")):
                order.append(number)
                await asyncio.sleep(0)

        await soon(asyncio.gather(*(request(n) for n in range(20))))
        assert order == list(range(20))


async def test_a_turn_ends_after_some_seconds_though_its_requests_are_few_and_long():
    async with KeyedBench(slots=2, max_workers=1, quantum=Quantum(leases=100, seconds=5)) as bench:
        await bench.served("a")
        bench.request("b")
        await settle()
        await bench.clock.advance(4.9)
        assert bench.sets() == {0: "a=1 ready"}
        await bench.clock.advance(0.2)
        assert bench.sets() == {0: "a=1 draining"}


async def test_a_turn_begins_when_others_begin_to_wait():
    async with KeyedBench(slots=2, max_workers=1, quantum=Quantum(leases=2, seconds=5)) as bench:
        for _ in range(5):
            await bench.use("a")
        await bench.served("a")
        await bench.clock.advance(100)
        bench.request("b")
        await settle()
        assert bench.sets() == {0: "a=1 ready"}
        await bench.clock.advance(5)
        assert bench.sets() == {0: "a=1 draining"}


async def test_a_set_without_a_worker_gets_one_that_becomes_idle_before_a_set_that_has_one():
    async with KeyedBench(slots=1, max_workers=2, quantum=Quantum(leases=9, seconds=1e9)) as bench:
        await bench.served("a")
        other = await bench.served("c")
        more, first = bench.request("a"), bench.request("b")
        await settle()
        await other.end()
        await soon(first.running.wait())
        assert not more.running.is_set()


async def test_sets_that_want_several_workers_get_them_in_turns():
    async with KeyedBench(slots=1, max_workers=5, quantum=Quantum(leases=9, seconds=1e9)) as bench:
        bench.may_stop.clear()
        for worker_id in range(5):
            await bench.served("f")
            bench.pool.drain_worker(worker_id)
        wanted = [bench.request(name) for name in "aaaabbbb"]
        await settle()
        for request in bench.tasks[:5]:
            request.cancel()
        await settle()
        bench.may_stop.set()
        await settle()
        assert sorted(bench.sets().values()) == ["a=1 ready"] * 3 + ["b=1 ready"] * 2
        assert [request.running.is_set() for request in wanted] == [True] * 3 + [False] + [True] * 2 + [False] * 2


async def test_of_the_busy_workers_one_whose_set_has_another_is_drained():
    async with KeyedBench(slots=2, max_workers=3, quantum=Quantum(leases=9, seconds=5)) as bench:
        await bench.served("c")
        for _ in range(4):
            await bench.served("a")
        bench.request("b")
        await settle()
        await bench.clock.advance(5)
        assert bench.sets() == {0: "c=1 ready", 1: "a=1 draining", 2: "a=1 ready"}


async def test_of_the_busy_workers_the_one_with_least_to_finish_is_drained():
    async with KeyedBench(slots=2, max_workers=2, quantum=Quantum(leases=9, seconds=5)) as bench:
        for name in "aac":
            await bench.served(name)
        bench.request("b")
        await settle()
        await bench.clock.advance(5)
        assert bench.sets() == {0: "a=1 ready", 1: "c=1 draining"}


async def test_where_a_worker_is_about_to_end_no_other_is_drained():
    async with KeyedBench(slots=1, max_workers=2, quantum=Quantum(leases=1, seconds=0)) as bench:
        a, _ = await bench.served("a"), await bench.served("c")
        bench.may_stop.clear()
        bench.pool.drain_worker(0)
        await a.end()
        waiting = bench.request("b")
        await settle()
        assert bench.sets() == {0: "a=1 stopped", 1: "c=1 ready"}
        bench.may_stop.set()
        await soon(waiting.running.wait())
        assert bench.sets() == {1: "c=1 ready", 2: "b=1 ready"}


async def test_a_set_without_a_worker_comes_before_one_that_wants_another():
    async with KeyedBench(slots=1, max_workers=2) as bench:
        first, second = await bench.served("a"), await bench.served("a")
        more, other = bench.request("a"), bench.request("b")
        await settle()
        await bench.clock.advance(3)
        await second.end() if "draining" in bench.sets()[1] else await first.end()
        await soon(other.running.wait())
        assert not more.running.is_set()


# -- overflow, cancellation ------------------------------------------------------------------------------------


async def test_beyond_the_queue_requests_get_503_with_retry_after():
    async with KeyedBench(slots=1, max_workers=1, max_queue=3) as bench:
        await bench.served("a")
        waiting = [bench.request("a") for _ in range(3)]
        await settle()
        with pytest.raises(Unavailable, match="too many requests: 3 wait for a worker") as refused:
            await soon(bench.request("a").task)
        assert refused.value.retry_after == 1
        assert not any(request.task.done() for request in waiting)


async def test_a_full_queue_refuses_the_newest_of_the_longest_line():
    async with KeyedBench(slots=1, max_workers=1, max_queue=3) as bench:
        await bench.served("a")
        flood = [bench.request("a") for _ in range(3)]
        await settle()
        other = bench.request("b")
        with pytest.raises(Unavailable):
            await soon(flood[-1].task)
        assert not other.task.done()


async def test_requests_that_a_starting_worker_will_take_do_not_count_as_waiting():
    async with KeyedBench(slots=2, max_workers=2, max_queue=0) as bench:
        await bench.served("a")
        bench.may_start.clear()
        requests = [bench.request("b") for _ in range(2)]
        await settle()
        with pytest.raises(Unavailable):
            await soon(bench.request("b").task)
        bench.may_start.set()
        for request in requests:
            await soon(request.running.wait())


async def test_500_requests_cancelled_while_they_wait_or_run_leave_nothing():
    async with KeyedBench(slots=2, max_workers=2, max_queue=1000) as bench:
        requests = [bench.request(random.Random(n).choice("abc")) for n in range(500)]
        await settle()
        random.Random(5).shuffle(requests)
        for request in requests:
            request.task.cancel()
        await asyncio.gather(*(request.task for request in requests), return_exceptions=True)
        await settle()
        _at_rest(bench)
        await bench.use("d")


def _at_rest(bench: KeyedBench) -> None:
    assert bench.pool.in_flight == 0
    assert bench.pool.residency.waiting == 0
    assert [worker.leases for worker in bench.pool.workers()] == [0] * len(bench.pool.workers())
    assert all(bench.pool.leases(version) == 0 for version in bench.versions.values())


async def test_a_lease_is_not_given_to_a_request_that_was_cancelled_just_before():
    async with KeyedBench(slots=1, max_workers=1) as bench:
        lease = bench.pool.lease(bench.bound("a"))
        await lease.__aenter__()
        cancelled, following = bench.request("a"), bench.request("a")
        await settle()
        cancelled.task.cancel()
        await lease.__aexit__(None, None, None)
        await soon(following.running.wait())
        assert bench.pool.workers()[0].leases == 1


async def test_closing_refuses_those_that_wait():
    async with KeyedBench(slots=1, max_workers=1) as bench:
        await bench.served("a")
        waiting = [bench.request("a"), bench.request("b")]
        await settle()
        await soon(bench.pool.close(0))
        for request in waiting:
            with pytest.raises(Unavailable, match="shutting down"):
                await soon(request.task)
        assert bench.pool.workers() == []


async def test_a_drain_refuses_new_requests_and_serves_those_that_wait():
    async with KeyedBench(slots=1, max_workers=1) as bench:
        running, waiting = await bench.served("a"), bench.request("b")
        await settle()
        drain = asyncio.create_task(bench.pool.drain(60))
        await settle()
        with pytest.raises(Unavailable, match="shutting down"):
            await soon(bench.request("a").task)
        await running.end()
        await soon(waiting.running.wait())
        assert not drain.done()
        await waiting.end()
        assert await soon(drain)


# -- everything at once ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(16))
async def test_whatever_comes_no_worker_has_two_sets_none_changes_while_leased_and_all_counts_return(seed):
    """Every request asserts its worker's set at its start and its end, and every change that nothing runs."""
    chance = random.Random(seed)
    limits = {"max_workers": chance.randint(1, 4), "max_queue": 60, "idle_timeout": chance.choice([0, 5])}
    budget = chance.choice([0, SHARED + OWN + 150, SHARED + 3 * OWN + 50])
    async with KeyedBench(slots=chance.randint(1, 3), memory_budget=budget, **limits) as bench:
        bench.keep_warm(*chance.choice([[], ["a"], ["b", "e"]]))
        requests: list[Request] = []
        for _ in range(250):
            action = chance.random()
            if action < 0.5:
                requests.append(
                    bench.request(chance.choice(["", "a", "b", "c", "a+b", "big"]), chance.choice([1, 0.5]))
                )
            elif action < 0.75:
                for request in chance.sample(requests, min(3, len(requests))):
                    request.may_end.set()
            elif action < 0.85 and requests:
                chance.choice(requests).task.cancel()
            elif action < 0.9:
                alive = [backend for backend in bench.backends if backend.alive and backend.running]
                if alive:
                    _kill(chance.choice(alive), requests)
            elif action < 0.93:
                bench.pool.drain_worker(chance.choice(bench.pool.workers()).id) if bench.pool.workers() else None
            else:
                await bench.clock.advance(chance.random() * 3)
            if chance.random() < 0.5:
                await asyncio.sleep(0)
            assert len(bench.pool.workers()) <= limits["max_workers"]
            assert not budget or bench.pool._fleet.memory <= budget
        for request in requests:
            request.may_end.set()
        while not all(request.task.done() for request in requests):
            await settle()
            await bench.clock.advance(1)
        for request in requests:
            if not request.task.cancelled() and (error := request.task.exception()) is not None:
                assert isinstance(error, (Unavailable, ConnectionError)), error
        await settle()
        _at_rest(bench)
        await bench.clock.advance(60)
        await bench.use("e")


def _kill(backend, requests: list[Request]) -> None:
    """The worker dies: its requests see their connections break."""
    for request in requests:
        if request.worker is backend and not request.task.done():
            request.fails_with = ConnectionError("broken")
            request.may_end.set()
    backend.die("error: killed")
