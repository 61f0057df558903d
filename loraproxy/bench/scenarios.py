"""The loads that are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loraproxy.bench.wire import Job, StreamJob

_PEOPLE = ("a baker", "a blacksmith", "a sailor", "a nurse", "a farmer", "a clockmaker", "a miller", "a teacher")
_PLACES = ("harbour", "market", "old bridge", "library", "lighthouse", "mill pond", "town hall", "orchard")


@dataclass(frozen=True)
class Scenario:
    """``streams`` requests at once, shared out over ``adapters`` adapters (0: the base model).

    key: its name on the command line; with_engine: the engine is driven without HTTP, too.
    """

    key: str
    title: str
    streams: int
    adapters: int
    with_engine: bool = False

    def job(self, n_predict: int) -> Job:
        """The requests; each has a prompt of its own."""
        return Job(
            streams=tuple(
                StreamJob(prompt=prompt(i), adapter=i % self.adapters if self.adapters else None)
                for i in range(self.streams)
            ),
            n_predict=n_predict,
        )


def prompt(number: int) -> str:
    """A prompt of about 45 tokens that differs from the others early on."""
    person, place = _PEOPLE[number % len(_PEOPLE)], _PLACES[number // len(_PEOPLE) % len(_PLACES)]
    return (
        f"You are {person} who has lived near the {place} for forty years. A traveller comes to your door late in the "
        "evening, tired and hungry, and asks you where to sleep tonight. Answer in your own words, and be kind."
    )


def scenarios(streams: int, adapters: int) -> tuple[Scenario, ...]:
    """All scenarios, for ``streams`` streams and ``adapters`` adapters, and for four times as many streams."""
    wide = 4 * streams

    def several(count: int) -> str:
        return "1 stream" if count == 1 else f"{count} streams"

    return (
        Scenario("base", f"{several(streams)}, no adapter", streams, 0, with_engine=True),
        Scenario("different", f"{several(streams)}, {adapters} adapters", streams, adapters, with_engine=True),
        Scenario("same", f"{several(streams)}, one adapter", streams, 1),
        Scenario("one", "1 stream, one adapter", 1, 1),
        Scenario("one-base", "1 stream, no adapter", 1, 0),
        Scenario("wide", f"{several(wide)}, {adapters} adapters", wide, adapters),
        Scenario("wide-base", f"{several(wide)}, no adapter", wide, 0),
    )


def by_slots(chosen: Sequence[Scenario], streams: int) -> list[tuple[int, list[Scenario]]]:
    """The scenarios grouped by the slots the servers are started with: ``streams``, or more where more are needed."""
    groups: dict[int, list[Scenario]] = {}
    for scenario in chosen:
        groups.setdefault(max(scenario.streams, streams), []).append(scenario)
    return list(groups.items())
