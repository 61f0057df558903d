from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from loraproxy.adapters.sets import BASE, AdapterSet
from loraproxy.worker.prefix_cache import PrefixCache
from loraproxy.worker.scheduler import Scheduler
from loraproxy.worker.text import TextStream
from loraproxy.worker.types import Generation

A, B = AdapterSet.of({0: 1.0}), AdapterSet.of({1: 1.0})


@dataclass(eq=False)
class Asked:
    """What the scheduler needs of a sequence, without a model's sampler."""

    task_id: int
    generation: Generation
    slot: int = -1
    n_past: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def n_prompt(self) -> int:
        return len(self.generation.prompt)

    @property
    def prefilling(self) -> bool:
        return self.n_past < self.n_prompt


def asked(task_id: int, adapters: AdapterSet = BASE, n_prompt: int = 4) -> Asked:
    return Asked(task_id, Generation(prompt=tuple(range(n_prompt)), adapters=adapters))


def admit_all(scheduler: Scheduler) -> list[int]:
    order = []
    while (sequence := scheduler.admit()) is not None:
        order.append(sequence.task_id)
    return order


def test_a_flood_for_one_adapter_lets_another_in_with_the_next_free_slot() -> None:
    scheduler = Scheduler(2)
    for number in range(20):
        scheduler.add(asked(number, A))  # type: ignore[arg-type]
    assert admit_all(scheduler) == [0, 1]
    for sequence in scheduler.running():
        scheduler.charge(sequence, 100.0)
    scheduler.add(asked(99, B))  # type: ignore[arg-type]
    scheduler.charge(scheduler.running()[0], 10.0)
    scheduler.remove(scheduler.running()[0])
    assert admit_all(scheduler) == [99]


def test_a_set_that_returns_after_a_pause_starts_level_with_those_present() -> None:
    scheduler = Scheduler(1)
    scheduler.add(asked(0, A))  # type: ignore[arg-type]
    admit_all(scheduler)
    scheduler.charge(scheduler.running()[0], 1000.0)
    scheduler.add(asked(1, B))  # type: ignore[arg-type]
    scheduler.add(asked(2, A))  # type: ignore[arg-type]
    scheduler.remove(scheduler.running()[0])
    assert admit_all(scheduler) == [1]
    scheduler.charge(scheduler.running()[0], 1.0)
    scheduler.add(asked(3, B))  # type: ignore[arg-type]
    scheduler.remove(scheduler.running()[0])
    assert admit_all(scheduler) == [2], "one token more and it is the other's turn: nothing was saved up"


def test_rows_span_from_the_first_to_the_last_decoding_slot_with_gaps_empty() -> None:
    scheduler = Scheduler(4)
    for number in range(4):
        scheduler.add(asked(number))  # type: ignore[arg-type]
    admit_all(scheduler)
    _first, second, _third, fourth = scheduler.running()
    assert scheduler.rows() is None
    for sequence in (second, fourth):
        sequence.n_past = sequence.n_prompt
    rows = scheduler.rows()
    assert rows is not None
    assert (rows.first, rows.sequences) == (1, (second, None, fourth))


def test_a_lonely_high_slot_moves_down_but_a_single_gap_among_many_stays() -> None:
    scheduler = Scheduler(8)
    for number in range(8):
        scheduler.add(asked(number))  # type: ignore[arg-type]
    admit_all(scheduler)
    running = scheduler.running()
    for sequence in running:
        sequence.n_past = sequence.n_prompt
    scheduler.remove(running[3])
    assert scheduler.move() is None
    for sequence in (*running[1:3], *running[4:7]):
        scheduler.remove(sequence)
    assert scheduler.move() == (running[7], 1)
    scheduler.moved(running[7], 1)
    assert scheduler.move() is None
    assert running[7].slot == 1


def test_prompt_chunks_keep_to_their_budget_and_one_always_goes() -> None:
    scheduler = Scheduler(4)
    for number in range(4):
        scheduler.add(asked(number, n_prompt=100))  # type: ignore[arg-type]
    admit_all(scheduler)
    assert len(scheduler.prefills(budget=130, chunk=64)) == 2
    assert len(scheduler.prefills(budget=1, chunk=64)) == 1


def test_the_prompt_cache_gives_whole_chunks_of_the_same_set_only() -> None:
    cache = PrefixCache(1 << 20, chunk=4)
    prompt = tuple(range(10))
    cache.store(A, prompt, b"cells")
    assert cache.find(B, prompt) is None
    assert cache.find(BASE, prompt) is None
    found = cache.find(A, (*range(6), 77, 78, 79))
    assert found is not None
    entry, length = found
    assert (entry.state, length) == (b"cells", 4)
    np.testing.assert_array_equal(entry.tokens, range(8))
    assert cache.find(A, prompt[:4]) is None, "one token at least must be computed"


def test_the_prompt_cache_stays_within_its_bytes_and_drops_the_least_recently_used() -> None:
    cache = PrefixCache(300, chunk=2)
    for start in (10, 20):
        cache.store(A, (start, start + 1, 0), bytes(100))
    assert cache.find(A, (10, 11, 0)) is not None
    cache.store(A, (30, 31, 0), bytes(100))
    assert cache.nbytes <= 300
    assert cache.find(A, (20, 21, 0)) is None
    assert cache.find(A, (10, 11, 0)) is not None
    cache.forget_adapter(0)
    assert (len(cache), cache.nbytes) == (0, 0)


def test_a_longer_prompt_replaces_the_beginning_it_extends() -> None:
    cache = PrefixCache(1 << 20, chunk=2)
    cache.store(A, (1, 2, 3), b"short")
    assert not cache.wants(A, (1, 2, 9))
    assert cache.wants(A, (1, 2, 3, 4, 5))
    cache.store(A, (1, 2, 3, 4, 5), b"long")
    assert len(cache) == 1


def push_all(stream: TextStream, *pieces: bytes) -> list[str]:
    return [stream.push(piece) for piece in pieces]


def test_an_incomplete_character_is_held_back() -> None:
    stream = TextStream(())
    assert push_all(stream, "é".encode()[:1], "é".encode()[1:], b"!") == ["", "é", "!"]
    assert stream.push(b"\xf0\x9f") == ""
    assert stream.finish() == "\ufffd"


def test_what_could_become_a_stop_string_is_held_back_and_a_stop_string_is_never_shown() -> None:
    stream = TextStream(("END",))
    assert push_all(stream, b"a E", b"N", b"d E") == ["a ", "", "ENd "]
    assert push_all(stream, b"ND more") == [""]
    assert stream.stopping_word == "END"
    assert stream.finish() == ""


@pytest.mark.parametrize(("stop", "shown"), [(("lo w", "o"), "hel"), (("wor", "rld"), "hello ")])
def test_the_earliest_stop_string_wins(stop: tuple[str, ...], shown: str) -> None:
    stream = TextStream(stop)
    assert stream.push(b"hello world") == shown
