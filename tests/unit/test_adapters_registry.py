import math
from pathlib import Path

import pytest

from loraproxy.adapters.names import check_name
from loraproxy.adapters.registry import AdapterRegistry
from loraproxy.adapters.sets import BASE, AdapterSet
from loraproxy.errors import InvalidRequest, UnknownAdapter


@pytest.fixture
def registry() -> AdapterRegistry:
    registry = AdapterRegistry()
    registry.add("pirate", Path("/a/pirate"))
    registry.add("bard", Path("/a/bard.gguf"), default_scale=0.5)
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


def test_the_digest_can_follow_once_the_content_is_read(registry):
    registry.set_digest("bard", "ab" * 32)
    assert registry.by_id(1).digest == "ab" * 32
    assert registry.by_id(1).default_scale == 0.5


def test_a_name_is_given_once(registry):
    with pytest.raises(InvalidRequest, match="'bard' is used twice"):
        registry.add("bard", Path("/a/other"))
    assert len(registry) == 2


@pytest.mark.parametrize("scale", [math.nan, math.inf, 1e39])
def test_a_default_scale_must_be_finite(registry, scale):
    with pytest.raises(InvalidRequest, match="the scale of 'wizard' must be a finite number"):
        registry.add("wizard", Path("/a/wizard"), default_scale=scale)
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
