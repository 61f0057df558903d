import asyncio
from contextlib import AsyncExitStack

import pytest

from loraproxy.adapters.sets import BASE, AdapterSet
from loraproxy.backends.llama_server_api import ServedAdapter
from loraproxy.backends.llama_server_places import Place, Places, Reach
from loraproxy.errors import Unavailable

A, B, C = (AdapterSet.of({number: 1.0}) for number in range(3))


class Scales:
    """A server that takes scales."""

    url = "http://old"

    def __init__(self):
        self.set = []
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def set_scales(self, scales):
        await self.go_on.wait()
        self.set.append(scales)


def place(slots=1, wire_ids=(0, 1, 2), **more):
    served = tuple(ServedAdapter(10 + i, f"/{i}.gguf", 1.0) for i in wire_ids)
    return Place(Scales(), Reach.UP, slots=slots, served=served, ids={i: 10 + i for i in wire_ids}, **more)


def places(*several):
    found = Places()
    found.all.extend(several)
    return found


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


class Request:
    """One that runs until it is told to end."""

    def __init__(self, where, adapters, avoid=()):
        self.end = asyncio.Event()
        self.place = None
        self.task = asyncio.create_task(self._run(where, adapters, avoid))

    async def _run(self, where, adapters, avoid):
        async with where.run(adapters, avoid) as self.place:
            await self.end.wait()

    async def finish(self):
        self.end.set()
        await self.task
        await settle()


def test_a_request_says_the_scale_of_every_adapter_of_its_server():
    assert place().lora(AdapterSet.of({1: 0.5})) == [
        {"id": 10, "scale": 0.0},
        {"id": 11, "scale": 0.5},
        {"id": 12, "scale": 0.0},
    ]
    assert [entry["scale"] for entry in place().lora(BASE)] == [0.0, 0.0, 0.0]
    assert place(wire_ids=()).lora(BASE) is None
    assert place(keyed=True).lora(A) is None


async def test_the_server_with_the_most_free_slots_that_has_the_adapters_is_taken():
    one, two = place(slots=2), place(slots=2, wire_ids=(0,))
    where = places(one, two)
    async with AsyncExitStack() as stack:
        assert await stack.enter_async_context(where.run(B)) is one
        assert await stack.enter_async_context(where.run(A)) is two
        assert await stack.enter_async_context(where.run(B)) is one
        assert await stack.enter_async_context(where.run(A)) is two
    assert (one.running, two.running) == (0, 0)


async def test_sets_take_turns_where_requests_wait():
    where = places(only := place())
    first = Request(where, A)
    flood = [Request(where, A) for _ in range(5)]
    await settle()
    other = Request(where, B)
    await settle()
    await first.finish()
    assert [request.place for request in flood] == [only, None, None, None, None]
    await flood[0].finish()
    assert other.place is only
    assert flood[1].place is None
    for request in (other, *flood[1:]):
        await request.finish()


async def test_a_client_that_goes_away_leaves_its_place_to_the_next():
    where = places(only := place())
    first, second, third = (Request(where, A) for _ in range(3))
    await settle()
    second.task.cancel()
    await first.finish()
    assert third.place is only
    third.task.cancel()
    await settle()
    assert only.running == 0


async def test_a_server_that_goes_down_fails_those_that_wait_for_it_unless_another_can():
    where = places(one := place(), two := place(wire_ids=(0,)))
    running = [Request(where, B), Request(where, A)]
    await settle()
    waiting_a, waiting_b = Request(where, A), Request(where, B)
    await settle()
    one.reach, one.why = Reach.DOWN, "gone"
    where.pump()
    with pytest.raises(Unavailable, match="gone"):
        await waiting_b.task
    await running[1].finish()
    assert waiting_a.place is two
    for request in (running[0], waiting_a):
        await request.finish()
    with pytest.raises(Unavailable, match="gone"):
        async with where.run(B):
            pass


async def test_a_server_that_is_being_checked_is_waited_for():
    only = place()
    only.reach = Reach.CHECKING
    where = places(only)
    request = Request(where, A)
    await settle()
    assert request.place is None
    only.reach = Reach.UP
    where.pump()
    await settle()
    assert request.place is only
    await request.finish()


async def test_a_server_that_refused_it_is_not_taken_again():
    where = places(one := place(), place())
    async with where.run(A, [one]) as found:
        assert found is not one


async def test_a_server_of_one_set_is_drained_before_it_changes_and_takes_all_that_wait_for_the_next():
    where = places(only := place(slots=2, keyed=True))
    first = Request(where, A)
    await settle()
    assert only.client.set == [{10: 1.0, 11: 0.0, 12: 0.0}]
    others = [Request(where, B) for _ in range(2)]
    await settle()
    late = Request(where, A)  # there is a slot, but B waits
    await settle()
    assert [request.place for request in (*others, late)] == [None, None, None]
    only.client.go_on.clear()
    await first.finish()
    assert others[0].place is None, "it runs before the scales are set"
    only.client.go_on.set()
    await settle()
    assert [request.place for request in (*others, late)] == [only, only, None]
    assert only.client.set[1:] == [{10: 0.0, 11: 1.0, 12: 0.0}]
    for request in (*others, late):
        await request.finish()
    assert only.client.set[2:] == [{10: 1.0, 11: 0.0, 12: 0.0}]


async def test_what_a_server_that_leaves_alone_has_still_runs_there():
    old, new = place(wire_ids=(0, 1), leaving=True), place(wire_ids=(1, 2))
    where = places(old, new)
    async with where.run(A) as a, where.run(C) as c:
        assert (a, c) == (old, new)
    async with where.run(B) as b:
        assert b is new
