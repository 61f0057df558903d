import math
from pathlib import Path

import pytest
from standin import summary

from loraproxy.adapters.names import check_name
from loraproxy.adapters.registry import AdapterRegistry, RegisteredAdapter, Source
from loraproxy.adapters.sets import BASE, AdapterSet
from loraproxy.errors import InvalidAdapterFile, InvalidRequest, UnknownAdapter


def put(registry: AdapterRegistry, name: str, digest: str = "0", scale: float | None = None) -> RegisteredAdapter:
    path = Path("/a") / name
    return registry.put(name, path, summary(name, path, digest), source=Source.CONFIGURED, default_scale=scale)


def wire(registry: AdapterRegistry, **scales: float) -> AdapterSet:
    """The names at these scales, as the worker would be asked for them."""
    return registry.bind(AdapterSet.of({registry.by_name(name).id: s for name, s in scales.items()})).adapters


@pytest.fixture
def registry() -> AdapterRegistry:
    registry = AdapterRegistry()
    put(registry, "pirate")
    put(registry, "bard", scale=0.5)
    return registry


def test_ids_count_up_in_order_of_registration(registry):
    assert [(adapter.id, adapter.name) for adapter in registry] == [(0, "pirate"), (1, "bard")]
    assert registry.names() == ("pirate", "bard")
    assert registry.names_by_id() == {0: "pirate", 1: "bard"}
    assert registry.by_id(1) is registry.by_name("bard")
    assert "bard" in registry
    assert len(registry) == 2


def test_an_adapter_is_off_by_default_unless_a_scale_was_given(registry):
    assert registry.by_name("pirate").default_scale == 0
    assert registry.default_set() == AdapterSet(((1, 0.5),))


def test_setting_defaults_turns_off_what_is_not_listed(registry):
    registry.set_defaults(AdapterSet.of({0: 2.0}))
    assert [adapter.default_scale for adapter in registry] == [2.0, 0.0]
    assert registry.default_set() == AdapterSet(((0, 2.0),))
    registry.set_defaults(BASE)
    assert registry.default_set() == BASE


def test_defaults_with_an_unknown_id_change_nothing(registry):
    with pytest.raises(UnknownAdapter, match=r"unknown adapter id 7; known ids: 0 \(pirate\), 1 \(bard\)"):
        registry.set_defaults(AdapterSet.of({0: 1.0, 7: 1.0}))
    assert registry.default_set() == AdapterSet(((1, 0.5),))
    assert registry.by_id(0).default_scale == 0


def test_a_replacement_keeps_id_scale_and_description_and_is_another_version(registry):
    before = registry.by_name("bard")
    bound = registry.bind(AdapterSet(((1, 1.0),)))
    after = put(registry, "bard", digest="1")
    assert (after.id, after.default_scale, after.description) == (before.id, 0.5, before.description)
    assert registry.default_set() == AdapterSet(((1, 0.5),))
    assert bound.adapters != registry.bind(AdapterSet(((1, 1.0),))).adapters
    assert bound.versions == (before.version,), "what was bound stays what it was"


def test_the_same_content_in_the_same_place_is_the_same_version(registry):
    before = wire(registry, bard=1)
    put(registry, "bard", scale=2.0)
    assert wire(registry, bard=1) == before
    assert registry.by_name("bard").default_scale == 2.0


def test_a_wire_id_is_never_used_again(registry):
    seen = {wire(registry, bard=1), wire(registry, pirate=1)}
    for digest in "1234":
        seen.add(wire(registry, bard=1))
        put(registry, "bard", digest)
        registry.remove("bard")
        put(registry, "bard", digest)
        seen.add(wire(registry, bard=1))
    assert len(seen) == 6


def test_a_removed_adapter_leaves_its_id_unused_and_gets_it_back(registry):
    registry.remove("bard")
    assert registry.default_set() == BASE
    with pytest.raises(UnknownAdapter, match=r"unknown adapter id 1; known ids: 0 \(pirate\)"):
        registry.by_id(1)
    with pytest.raises(UnknownAdapter, match="unknown adapter 'bard'; known adapters: pirate"):
        registry.remove("bard")
    assert put(registry, "robot").id == 2
    assert put(registry, "bard").id == 1
    assert registry.names() == ("pirate", "bard", "robot")
    assert registry.by_name("bard").default_scale == 0


def test_a_failed_adapter_is_known_and_says_why_when_it_is_asked_for(registry):
    registry.put("bard", Path("/a/bard"), "its file is damaged", source=Source.FOLDER)
    assert "bard" in registry
    with pytest.raises(InvalidAdapterFile, match="its file is damaged"):
        wire(registry, bard=1)
    assert wire(registry, pirate=1)


def test_among_a_thousand_names_an_unknown_one_is_told_the_nearest_and_a_few(registry):
    for number in range(1000):
        put(registry, f"npc-{number}")
    with pytest.raises(UnknownAdapter) as caught:
        registry.by_name("npc-50O")
    assert "did you mean 'npc-50'" in caught.value.message or "did you mean 'npc-500'" in caught.value.message
    assert caught.value.message.endswith(" and 978 more")
    assert len(caught.value.message) < 600


@pytest.mark.parametrize("scale", [math.nan, math.inf, 1e39])
def test_a_default_scale_must_be_finite(registry, scale):
    with pytest.raises(InvalidRequest, match="the scale of 'wizard' must be a finite number"):
        put(registry, "wizard", scale=scale)
    assert "wizard" not in registry


@pytest.mark.parametrize("name", ["a", "pirate-2.1_b", "_x", "-", "A" * 128, "none2", "1"])
def test_names_of_plain_characters_are_allowed(name):
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", ".hidden", "..", "a b", "a/b", "a:b", "a,b", "a=b", "ä", "a\n", "a" * 129])
def test_names_that_would_not_survive_urls_and_headers_are_refused(name):
    with pytest.raises(InvalidRequest, match="use 1 to 128 of A-Z a-z 0-9"):
        check_name(name)


@pytest.mark.parametrize("name", ["none", "base", "None", "BASE"])
def test_the_words_for_the_base_model_name_no_adapter(name):
    with pytest.raises(InvalidRequest, match="reserved for the base model"):
        check_name(name)
