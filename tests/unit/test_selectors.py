import itertools
import json
import math
import random
from pathlib import Path

import pytest
from standin import summary

from loraproxy.adapters.registry import AdapterRegistry, Source
from loraproxy.adapters.selectors import MAX_ENTRIES, parse_lora, resolve
from loraproxy.adapters.sets import BASE, AdapterSet
from loraproxy.errors import InvalidRequest, UnknownAdapter

BASE_NAMES = ("smollm2", "SmolLM2-135M", "/srv/nope/SmolLM2-135M.gguf")


@pytest.fixture
def registry() -> AdapterRegistry:
    registry = AdapterRegistry()
    for name in ("pirate", "bard", "robot"):
        path = Path(f"/adapters/{name}")
        registry.put(name, path, summary(name, path), source=Source.CONFIGURED)
    return registry


def select(registry, body, url_adapter=None, strict_models=False) -> AdapterSet:
    return resolve(body, url_adapter, registry, BASE_NAMES, strict_models)


def refusal(registry, body, url_adapter=None, strict_models=False, error=InvalidRequest) -> str:
    with pytest.raises(error) as caught:
        select(registry, body, url_adapter, strict_models)
    assert caught.value.status == 400
    assert caught.value.body()["error"]["type"] == "invalid_request_error"
    return caught.value.message


@pytest.mark.parametrize(
    ("lora", "entries"),
    [
        ([{"id": 0, "scale": 0.5}], [(0, 0.5)]),
        ([{"id": 1, "scale": 1}, {"id": 0, "scale": -2}], [(0, -2.0), (1, 1.0)]),
        ([{"name": "pirate", "scale": 1.0}], [(0, 1.0)]),
        ([{"name": "bard"}], [(1, 1.0)]),
        ([{"id": 1, "name": "bard", "path": "/adapters/bard", "scale": 0.25}], [(1, 0.25)]),
        ("pirate", [(0, 1.0)]),
        (["pirate", "bard"], [(0, 1.0), (1, 1.0)]),
        (["bard", {"id": 0, "scale": 0.5}], [(0, 0.5), (1, 1.0)]),
        ({"pirate": 0.75, "bard": 0.25}, [(0, 0.75), (1, 0.25)]),
        ([], []),
        ({}, []),
        ("none", []),
        ([{"id": 0, "scale": 0.0}], []),
        ([{"id": 0, "scale": 0}, {"id": 2, "scale": 1}], [(2, 1.0)]),
    ],
)
def test_every_form_of_lora_means_its_set(registry, lora, entries):
    assert select(registry, {"lora": lora}) == AdapterSet(tuple(entries))


def test_adapters_that_lora_does_not_list_have_scale_0_whatever_the_defaults(registry):
    registry.set_defaults(AdapterSet.of({0: 1.0, 2: 1.0}))
    assert select(registry, {}) == AdapterSet(((0, 1.0), (2, 1.0)))
    assert select(registry, {"lora": [{"id": 1, "scale": 0.5}]}) == AdapterSet(((1, 0.5),))
    assert select(registry, {"lora": []}) == BASE


def test_null_is_as_good_as_absent(registry):
    registry.set_defaults(AdapterSet.of({2: 0.5}))
    body = {"lora": None, "adapter_id": None, "parameters": {"adapter_id": None}, "model": None}
    assert select(registry, body) == AdapterSet(((2, 0.5),))


def test_without_defaults_a_request_without_a_selector_runs_the_base(registry):
    assert select(registry, {"prompt": "hi"}) == BASE


@pytest.mark.parametrize(
    ("body", "url", "chosen"),
    [
        ({"lora": "pirate", "adapter_id": "bard", "model": "robot"}, "bard", "pirate"),
        ({"adapter_id": "bard", "model": "robot"}, "pirate", "bard"),
        ({"parameters": {"adapter_id": "pirate"}, "adapter_id": "bard", "model": "robot"}, None, "pirate"),
        ({"model": "robot"}, "pirate", "robot"),
        ({"model": "smollm2:robot"}, "pirate", "robot"),
        ({"model": "gpt-4o"}, "pirate", "pirate"),
        ({"model": "smollm2"}, "pirate", "pirate"),
        ({}, "pirate", "pirate"),
        ({"lora": "none", "model": "robot"}, "pirate", None),
        ({"adapter_id": "none", "model": "robot"}, "pirate", None),
        ({"model": "smollm2:none"}, "pirate", None),
        ({}, "none", None),
        ({}, None, "bard"),
    ],
)
def test_the_first_selector_in_order_of_precedence_decides(registry, body, url, chosen):
    registry.set_defaults(AdapterSet.of({1: 1.0}))
    expected = BASE if chosen is None else AdapterSet(((registry.by_name(chosen).id, 1.0),))
    assert select(registry, body, url) == expected


@pytest.mark.parametrize("model", ["gpt-4o", "smollm2:latest", "other:pirate", ":pirate", 7, ["pirate"]])
def test_an_unknown_model_is_ignored_unless_models_are_strict(registry, model):
    assert select(registry, {"model": model}) == BASE
    message = refusal(registry, {"model": model, "lora": "pirate"}, strict_models=True)
    assert "unknown model" in message
    assert "SmolLM2-135M, smollm2" in message
    assert "pirate" in message


@pytest.mark.parametrize("strict_models", [False, True])
@pytest.mark.parametrize(
    "adapter", ["nope", "pirat", "npc-12", "pirate2", "q4-pirate", "base-camp", "Pirate", "pirate:robot", "-.-"]
)
def test_an_adapter_that_is_not_known_behind_the_base_models_name_is_an_error(registry, adapter, strict_models):
    message = refusal(registry, {"model": f"smollm2:{adapter}"}, strict_models=strict_models, error=UnknownAdapter)
    assert message.startswith(f"unknown adapter '{adapter}'; ")
    assert "known adapters: bard, pirate" in message


@pytest.mark.parametrize(
    "tag",
    [
        *("latest", "135m", "1.7b", "v0.3", "135m-instruct-q4_0", "Q4_K_M", "UD-IQ2_XXS", "fp16", "bf16", "8x7b"),
        *("30b-a3b", "4b-it-qat", "instruct", "SmolLM2-135M", "", "128k", "e4b", "mxfp4"),
    ],
)
def test_a_tag_behind_the_base_models_name_selects_nothing(registry, tag):
    assert select(registry, {"model": f"smollm2:{tag}"}) == BASE


@pytest.mark.parametrize("model", [None, "pirate", "smollm2", "SmolLM2-135M:bard"])
def test_known_models_pass_when_models_are_strict(registry, model):
    select(registry, {"model": model}, strict_models=True)


@pytest.mark.parametrize(
    ("body", "url"),
    [
        ({"lora": "pirat"}, None),
        ({"lora": ["pirat"]}, None),
        ({"lora": {"pirat": 1}}, None),
        ({"lora": [{"name": "pirat"}]}, None),
        ({"adapter_id": "pirat"}, None),
        ({"parameters": {"adapter_id": "pirat"}}, None),
        ({}, "pirat"),
        ({"lora": "bard"}, "pirat"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_known_names(registry, body, url):
    message = refusal(registry, body, url, error=UnknownAdapter)
    assert message == "unknown adapter 'pirat'; did you mean 'pirate'? known adapters: bard, pirate, robot"


def test_an_unknown_id_is_an_error_with_the_known_ids(registry):
    message = refusal(registry, {"lora": [{"id": 3, "scale": 1}]}, error=UnknownAdapter)
    assert message == "unknown adapter id 3; known ids: 0 (pirate), 1 (bard), 2 (robot)"


def test_without_adapters_an_unknown_name_says_so():
    with pytest.raises(UnknownAdapter, match="unknown adapter 'pirate'; no adapters are loaded"):
        parse_lora("pirate", AdapterRegistry())


@pytest.mark.parametrize(
    ("lora", "reason"),
    [
        (1, "lora must not be a number"),
        (True, "lora must not be a boolean"),
        (0.5, "lora must not be a number"),
        ([0], "lora[0] must not be a number"),
        ([None], "lora[0] must not be null"),
        ([["pirate"]], "lora[0] must not be a list"),
        ([{}], 'lora[0] has neither "id" nor "name"'),
        ([{"scale": 1}], 'lora[0] has neither "id" nor "name"'),
        ([{"id": 0}], 'lora[0] has an "id" but no "scale"'),
        ([{"id": "0", "scale": 1}], "lora[0].id must be a whole number, not a string"),
        ([{"id": 0.0, "scale": 1}], "lora[0].id must be a whole number, not a number"),
        ([{"id": False, "scale": 1}], "lora[0].id must be a whole number, not a boolean"),
        ([{"id": -1, "scale": 1}], "lora[0].id must not be negative"),
        ([{"id": 0, "scale": "1"}], "lora[0].scale must be a number, not a string"),
        ([{"id": 0, "scale": True}], "lora[0].scale must be a number, not a boolean"),
        ([{"id": 0, "scale": None}], "lora[0].scale must be a number, not null"),
        ([{"id": 0, "scale": math.nan}], "lora[0].scale must be a finite number"),
        ([{"id": 0, "scale": -math.inf}], "lora[0].scale must be a finite number"),
        ([{"id": 0, "scale": 10**400}], "lora[0].scale must be a finite number"),
        ([{"id": 0, "scale": 1e39}], "is not a finite number that a float32 can hold"),
        ([{"id": 0, "scale": 1, "scal": 2}], "lora[0] has an unknown key 'scal'"),
        ([{"name": 0}], "lora[0].name must be a string, not a number"),
        ([{"name": "pirate", "id": 1, "scale": 1}], "are different adapters"),
        ({"id": 0, "scale": 1.0}, "lora is one object; put it into a list"),
        ({"pirate": "1"}, "lora['pirate'] must be a number, not a string"),
        ({"pirate": math.inf}, "lora['pirate'] must be a finite number"),
        (["pirate", "pirate"], "lora names adapter 'pirate' (id 0) twice"),
        ([{"id": 0, "scale": 1}, {"name": "pirate"}], "lora names adapter 'pirate' (id 0) twice"),
        ([{"id": 0, "scale": 0}] * (MAX_ENTRIES + 1), "lora has 33 entries; at most 32"),
        ([{"id": i, "scale": 1} for i in range(10_000)], "lora has 10000 entries; at most 32"),
        ({str(i): 1 for i in range(10_000)}, "lora has 10000 entries; at most 32"),
    ],
)
def test_malformed_lora_is_refused_with_what_is_wrong(registry, lora, reason):
    assert reason in refusal(registry, {"lora": lora})


def test_scales_that_only_pythons_json_reads_are_refused(registry):
    for scale in ("NaN", "Infinity", "-Infinity", "1e999"):
        refusal(registry, json.loads(f'{{"lora": [{{"id": 0, "scale": {scale}}}]}}'))


@pytest.mark.parametrize("body", [{"adapter_id": 1}, {"adapter_id": ["pirate"]}, {"parameters": {"adapter_id": False}}])
def test_an_adapter_id_that_is_no_string_is_refused(registry, body):
    assert "adapter_id must be an adapter's name" in refusal(registry, body)


@pytest.mark.parametrize("parameters", [None, 3, "adapter_id", ["adapter_id"], {}])
def test_parameters_without_an_adapter_id_select_nothing(registry, parameters):
    assert select(registry, {"parameters": parameters}) == BASE


def test_messages_stay_short_however_long_the_input(registry):
    for body in ({"lora": "x" * 10**6}, {"lora": [{"id": 10**4000, "scale": 1}]}, {"lora": {"y" * 10**6: 1}}):
        assert len(refusal(registry, body)) < 400


def test_equal_selections_in_any_order_and_form_give_one_set(registry):
    scales = {"pirate": 0.7, "bard": 0.3, "robot": -1.5}
    expected = AdapterSet.of({registry.by_name(name).id: scale for name, scale in scales.items()})
    for order in itertools.permutations(scales):
        by_name = [{"name": name, "scale": scales[name]} for name in order]
        by_id = [{"id": registry.by_name(name).id, "scale": scales[name]} for name in order]
        for lora in ({name: scales[name] for name in order}, by_name, by_id):
            assert select(registry, {"lora": lora}) == expected


def test_a_set_written_to_the_wire_reads_back_as_itself(registry):
    draw = random.Random(7)
    for _ in range(300):
        ids = draw.sample(range(3), draw.randint(0, 3))
        chosen = AdapterSet.of({i: draw.choice([0.0, 1.0, draw.uniform(-4, 4), draw.gauss(0, 1e-20)]) for i in ids})
        assert list(chosen.entries) == sorted(chosen.entries)
        assert all(scale != 0 for _, scale in chosen.entries)
        assert parse_lora(json.loads(json.dumps(chosen.wire())), registry) == chosen
