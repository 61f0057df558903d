"""Loading on demand within a budget: who waits for whom, who leaves, and what becomes of failures."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest
from standin import soon, summary

from loraproxy.adapters.registry import Version
from loraproxy.errors import InvalidAdapterFile, InvalidRequest, WorkerFailed
from loraproxy.pool.residency import MAX_OVERTAKEN, Residency


class ScriptedLoader:
    """Loads at once, or when the test says so; counts what it holds and asserts that the budget bounds it."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.held: dict[int, int] = {}
        self.loads: Counter[str] = Counter()
        self.evicted: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.failures: dict[str, Exception] = {}
        self.sizes: dict[str, int] = {}
        """Of adapters that turn out to take more or less than was thought."""
        self.began = asyncio.Condition()

    def hold(self, *names: str) -> None:
        """Loads of these wait until :meth:`release`."""
        for name in names:
            self.gates[name] = asyncio.Event()

    def release(self, name: str) -> None:
        self.gates.pop(name).set()

    async def load(self, version: Version) -> int:
        self.loads[version.name] += 1
        async with self.began:
            self.began.notify_all()
        self.held[version.wire_id] = version.summary.resident_bytes
        assert not self.budget or sum(self.held.values()) <= self.budget
        if gate := self.gates.get(version.name):
            await gate.wait()
        if problem := self.failures.get(version.name):
            del self.held[version.wire_id]
            raise problem
        await asyncio.sleep(0)
        return self.sizes.get(version.name, version.summary.resident_bytes)

    async def unload(self, version: Version, *, evicted: bool) -> None:
        await asyncio.sleep(0)
        del self.held[version.wire_id]
        if evicted:
            self.evicted.append(version.name)

    async def until_loading(self, name: str) -> None:
        async with self.began:
            await soon(self.began.wait_for(lambda: self.loads[name] > 0))


class Room:
    """A residency over a scripted loader, with versions of given sizes."""

    def __init__(self, budget: int, folder: Path = Path("/nowhere"), **sizes: int) -> None:
        self.loader = ScriptedLoader(budget)
        self.residency = Residency(self.loader, budget)
        self.versions = {
            name: Version(i, name, folder / name, summary(name, folder / name, nbytes=size))
            for i, (name, size) in enumerate(sizes.items())
        }

    def hold(self, *names: str):
        return self.residency.hold([self.versions[name] for name in names])

    async def use(self, *names: str) -> None:
        async with self.hold(*names):
            pass

    def states(self) -> dict[str, str]:
        return {name: self.residency.state(version) for name, version in self.versions.items()}


def start(awaitable) -> asyncio.Task[None]:
    return asyncio.create_task(awaitable)


async def settle() -> None:
    """Let everything that can go on do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_an_adapter_is_loaded_once_for_all_that_wait_for_it_and_stays():
    room = Room(100, a=10)
    room.loader.hold("a")
    users = [start(room.use("a")) for _ in range(5)]
    await room.loader.until_loading("a")
    assert room.states() == {"a": "loading"}
    room.loader.release("a")
    await soon(asyncio.gather(*users))
    await room.use("a")
    assert room.loader.loads == {"a": 1}
    assert room.states() == {"a": "resident"}
    assert room.residency.nbytes == 10


async def test_a_request_waits_for_its_own_load_only():
    room = Room(100, slow=10, quick=10)
    room.loader.hold("slow")
    slow = start(room.use("slow"))
    await room.loader.until_loading("slow")
    await soon(room.use("quick"))
    assert not slow.done()
    room.loader.release("slow")
    await soon(slow)


async def test_the_least_recently_used_leaves_for_one_that_does_not_fit():
    room = Room(30, a=10, b=10, c=10, d=10)
    for name in "abcabd":
        await soon(room.use(name))
    await settle()
    assert room.loader.evicted == ["c"]
    assert room.states() == {"a": "resident", "b": "resident", "c": "registered", "d": "resident"}


async def test_one_that_turns_out_larger_than_thought_pushes_others_out():
    room = Room(100, a=40, b=40, c=20)
    room.loader.sizes["c"] = 40
    await room.use("a")
    await room.use("b")
    await room.use("c")
    assert room.residency.nbytes == 80
    assert room.states() == {"a": "registered", "b": "resident", "c": "resident"}


async def test_one_that_turns_out_larger_beside_what_is_in_use_leaves_again_and_waits_for_its_room():
    room = Room(100, a=60, b=40)
    room.loader.sizes["b"] = 80
    async with room.hold("a"):
        waits = start(room.use("b"))
        await settle()
        assert not waits.done()
        assert room.residency.nbytes == 60
        assert room.states() == {"a": "resident", "b": "registered"}
    await soon(waits)
    assert room.loader.loads["b"] == 2
    assert room.residency.nbytes == 80
    assert room.states() == {"a": "registered", "b": "resident"}


async def test_one_that_turns_out_larger_than_the_budget_is_refused():
    room = Room(100, a=60)
    room.loader.sizes["a"] = 120
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="more than"):
            await soon(room.use("a"))
    assert room.loader.loads["a"] == 1
    assert room.residency.nbytes == 0
    assert not room.loader.held


async def test_what_is_leased_never_leaves_and_others_wait_for_it():
    room = Room(20, a=10, b=10, c=10)
    async with room.hold("a", "b"):
        waiting = start(room.use("c"))
        await settle()
        assert not waiting.done()
        assert room.residency.waiting == 1
        assert room.loader.evicted == []
    await soon(waiting)
    assert room.loader.evicted == ["a"]


async def test_a_set_takes_all_its_adapters_or_none_so_that_two_cannot_block_each_other():
    room = Room(20, a=10, b=10, c=10)
    async with room.hold("c"):
        both = [start(room.use("a", "b")), start(room.use("b", "a"))]
        await settle()
        assert room.loader.loads == {"c": 1}, "neither holds one adapter while it waits for the other"
    await soon(asyncio.gather(*both))


async def test_those_that_wait_for_memory_are_served_in_order():
    room = Room(10, a=10, b=10, c=10)
    order: list[str] = []

    async def use(name: str) -> None:
        async with room.hold(name):
            order.append(name)

    async with room.hold("a"):
        tasks = []
        for name in "bcbc":
            tasks.append(start(use(name)))
            await settle()
    await soon(asyncio.gather(*tasks))
    assert order == ["b", "c", "b", "c"]


async def test_a_stream_of_requests_for_resident_adapters_does_not_starve_one_that_waits():
    room = Room(10, a=10, b=10)
    held = room.hold("a")
    await held.__aenter__()
    waiting = start(room.use("b"))
    await settle()
    passed = 0
    while not waiting.done():
        following = room.hold("a")
        entering = start(following.__aenter__())
        await settle()
        if not entering.done():
            break
        passed += 1
        await held.__aexit__(None, None, None)  # at every moment somebody holds it
        held = following
    assert passed == MAX_OVERTAKEN
    await held.__aexit__(None, None, None)
    await soon(waiting)
    await soon(entering)
    await following.__aexit__(None, None, None)


async def test_a_set_that_never_fits_is_refused_with_the_numbers():
    room = Room(3 * 1024**2, a=2 * 1024**2, b=2 * 1024**2)
    with pytest.raises(InvalidRequest, match=r"'a' and 'b' need 4\.0 MiB of memory, more than the 3\.0 MiB"):
        await room.use("a", "b")
    await soon(room.use("a"))


async def test_a_failure_reaches_all_that_wait_and_is_remembered_until_the_file_changes(tmp_path):
    file = tmp_path / "a"
    file.write_text("broken")
    room = Room(100, tmp_path, a=10, b=10)
    room.loader.failures["a"] = InvalidAdapterFile("the file is damaged")
    room.loader.hold("a")
    users = [start(room.use("a")), start(room.use("b", "a"))]
    await room.loader.until_loading("a")
    room.loader.release("a")
    for user in users:
        with pytest.raises(InvalidAdapterFile, match="the file is damaged"):
            await soon(user)
    with pytest.raises(InvalidAdapterFile, match="the file is damaged"):
        await room.use("a")
    assert room.loader.loads == {"a": 1, "b": 1}, "it was not tried again"
    assert room.residency.failure(room.versions["a"]) == "the file is damaged"
    del room.loader.failures["a"]
    file.write_text("repaired")
    await soon(room.use("a"))
    assert room.residency.failure(room.versions["a"]) == ""
    assert room.residency.nbytes == 20


async def test_a_failure_gives_its_memory_to_the_next_in_line():
    room = Room(10, a=10, b=10)
    room.loader.failures["a"] = InvalidAdapterFile("no")
    room.loader.hold("a")
    failing, waiting = start(room.use("a")), start(room.use("b"))
    await room.loader.until_loading("a")
    room.loader.release("a")
    await soon(waiting)
    with pytest.raises(InvalidAdapterFile):
        await failing


async def test_a_request_that_is_cancelled_while_it_waits_gives_way():
    room = Room(20, a=10, b=20, c=10)
    async with room.hold("a"):
        large, small = start(room.use("b")), start(room.use("c"))
        await settle()
        assert not small.done(), "it came later"
        large.cancel()
        await soon(small)
    assert room.residency.waiting == 0


async def test_a_request_that_is_cancelled_while_its_adapter_loads_leaves_it_to_be_used_or_evicted():
    room = Room(10, a=10, b=10)
    room.loader.hold("a")
    user = start(room.use("a"))
    await room.loader.until_loading("a")
    user.cancel()
    other = start(room.use("b"))
    await settle()
    room.loader.release("a")
    await soon(other)
    assert room.loader.evicted == ["a"]


async def test_a_removed_version_leaves_at_once():
    room = Room(0, a=10)
    await soon(room.use("a"))
    await soon(room.residency.remove(room.versions["a"]))
    assert room.loader.held == {}
    assert room.loader.evicted == [], "nothing needed its room"
    assert room.residency.nbytes == 0


async def test_when_the_worker_ends_those_that_wait_or_load_fail_with_the_reason():
    room = Room(10, a=10, b=10)
    room.loader.hold("a")
    loading, waiting = start(room.use("a")), start(room.use("b"))
    await room.loader.until_loading("a")
    await soon(room.residency.close(WorkerFailed("the worker ended")))
    for task in (loading, waiting, start(room.use("b"))):
        with pytest.raises(WorkerFailed, match="the worker ended"):
            await soon(task)


async def test_whatever_comes_the_budget_holds_everyone_is_served_and_all_memory_is_accounted_for():
    names = [f"n{i}" for i in range(12)]
    chance = random.Random(7)
    room = Room(60, **{name: chance.randint(5, 20) for name in names})

    async def use() -> None:
        async with room.hold(*chance.sample(names, chance.randint(1, 3))):
            for _ in range(chance.randint(0, 5)):
                await asyncio.sleep(0)

    for _ in range(40):
        tasks = [start(use()) for _ in range(25)]
        for task in chance.sample(tasks, 5):
            await asyncio.sleep(0)
            task.cancel()
        done, pending = await asyncio.wait(tasks, timeout=10)
        assert not pending
        assert all(task.cancelled() or task.exception() is None for task in done)
    await settle()
    assert room.residency.nbytes == sum(room.loader.held.values()) <= 60
    assert room.residency.waiting == 0
