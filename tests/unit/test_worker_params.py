"""Request fields: llama-server's names, aliases, limits and defaults, and what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from scripted import ByteModel

from loraproxy.errors import InvalidRequest, NotSupported
from loraproxy.worker.app import parse_json_object
from loraproxy.worker.fields import FLOAT32_MAX
from loraproxy.worker.params import CompletionParams, parse_params
from loraproxy.worker.prompts import tokenize_mixed, tokenize_prompts
from loraproxy.worker.settings_view import Shown, full_settings
from loraproxy.worker.types import SamplingParams


def parse(**fields: Any) -> CompletionParams:
    return parse_params(fields, ByteModel(), {0, 1, 2}, 4)


def test_an_empty_request_has_llama_servers_defaults() -> None:
    params = parse()
    assert params.sampling == SamplingParams()
    assert (params.n_predict, params.n_cmpl, params.stop, params.stream) == (-1, 1, (), False)
    assert params.cache_prompt
    assert params.adapters.is_base


def test_null_counts_as_absent() -> None:
    assert parse(temperature=None, stop=None, n_predict=None, lora=None, logit_bias=None) == parse()


def test_the_native_name_wins_over_its_aliases() -> None:
    assert parse(max_tokens=5).n_predict == 5
    assert parse(max_tokens=5, max_completion_tokens=6).n_predict == 6
    assert parse(max_tokens=5, max_completion_tokens=6, n_predict=7).n_predict == 7
    assert parse(n=2).n_cmpl == 2
    assert parse(logprobs=3).n_probs == 3
    assert parse(logprobs=3, n_probs=1).n_probs == 1


def test_soft_limits_clamp_as_in_llama_server() -> None:
    sampling = parse(top_p=1.5, min_p=-1, top_k=-5, temperature=-1, mirostat=9).sampling
    assert (sampling.top_p, sampling.min_p, sampling.top_k) == (1.0, 0.0, 0)
    assert (sampling.temperature, sampling.mirostat) == (0.0, 2)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("n_predict", -2, "an integer between -1 and"),
        ("n_predict", "5", "an integer"),
        ("n_predict", 2.5, "an integer"),
        ("n_predict", True, "an integer"),
        ("n_cmpl", 5, "an integer between 1 and 4"),
        ("temperature", "hot", "a number"),
        ("temperature", 1e300, "a finite number"),
        ("temperature", 10**400, "a finite number"),
        ("stream", 1, "true or false"),
        ("stream_options", [], "an object"),
        ("stop", 5, "a string or an array of strings"),
        ("stop", ["a", 5], "an array of strings"),
        ("grammar", 5, "a string in GBNF"),
        ("json_schema", "x", "an object"),
        ("samplers", 5, "an array of sampler names"),
        ("dry_sequence_breakers", [], "a non-empty array of strings"),
        ("logit_bias", 5, "an array of [token, bias] pairs"),
        ("logit_bias", [[1, 2, 3]], "pairs of a token and a bias"),
        ("logit_bias", [[1.5, 2]], "a token id or a string"),
        ("response_fields", ["a", 1], "an array of strings"),
        ("stop", ["x"] * 257, "257 entries, but at most 256 are taken"),
        ("dry_sequence_breakers", ["x"] * 65, "65 entries, but at most 64 are taken"),
        ("samplers", ["top_k"] * 65, "65 entries, but at most 64 are taken"),
        ("samplers", "z" * 10_000, "10000 entries, but at most 64 are taken"),
        ("lora", {"id": 0}, "an array of objects"),
        ("lora", [0], "objects with"),
        ("lora", [{"id": 0}], "objects with"),
        ("lora", [{"id": "0", "scale": 1}], "an integer"),
        ("lora", [{"id": 0, "scale": "1"}], "a number"),
        ("lora", [{"id": 0, "scale": 1e39}], "a finite number"),
        ("lora", [{"id": -1, "scale": 1}], "no adapter has the id -1; known ids: 0, 1, 2"),
        ("lora", [{"id": 3, "scale": 1}], "no adapter has the id 3; known ids: 0, 1, 2"),
        ("lora", [{"id": 1, "scale": 1}, {"id": 1, "scale": 2}], "twice"),
        ("lora", [{"id": 1, "scale": 1}] * 10_000, "10000 entries, but there are 3 adapters"),
    ],
)
def test_a_wrong_value_is_refused_with_the_field_the_value_and_what_would_be_right(
    field: str, value: Any, expected: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**{field: value})
    assert f"Field '{field}'" in caught.value.message
    assert expected in caught.value.message


@pytest.mark.parametrize(
    "fields", [{"n_indent": 2}, {"grammar_lazy": True}, {"adaptive_target": 0.5}, {"samplers": ["infill"]}]
)
def test_what_only_llama_server_can_do_is_not_supported(fields: dict[str, Any]) -> None:
    with pytest.raises(NotSupported):
        parse(**fields)


def test_samplers_come_by_name_alias_or_letter_and_unknown_ones_are_left_out() -> None:
    assert parse(samplers=["top-k", "TEMP", "nucleus", "adaptive_p"]).sampling.samplers == (
        "top_k",
        "temperature",
        "top_p",
    )
    assert parse(samplers="kty").sampling.samplers == ("top_k", "temperature", "typ_p")
    assert parse(samplers=["no_such_thing", "min_p"]).sampling.samplers == ("min_p",)
    assert parse(samplers=[]).sampling.samplers == ()


def test_the_seed_minus_one_is_random_and_each_completion_of_a_prompt_has_its_own() -> None:
    assert parse(seed=-1).sampling.seed == 0xFFFFFFFF
    assert parse(seed=2**32 + 5).sampling.seed == 5
    params = parse(seed=7, n=3)
    assert [params.generation((1,), child).sampling.seed for child in range(3)] == [7, 8, 9]
    assert parse(n=2).generation((1,), 1).sampling.seed == 0xFFFFFFFF


def test_logit_bias_takes_pairs_objects_strings_and_false() -> None:
    assert parse(logit_bias=[[5, 1.5], ["ab", -1], [6, False]]).sampling.logit_bias == (
        (5, 1.5),
        (97, -1.0),
        (98, -1.0),
        (6, -math.inf),
    )
    assert parse(logit_bias={"5": 1, "z": 2, "9999": 3}).sampling.logit_bias == ((5, 1.0), (122, 2.0))


def test_biases_of_one_token_are_added_up_within_what_a_float_can_hold() -> None:
    assert parse(logit_bias=[[5, 1.5], [6, 1], [5, -1]]).sampling.logit_bias == ((5, 0.5), (6, 1.0))
    assert parse(logit_bias=[[5, 3e38]] * 4).sampling.logit_bias == ((5, FLOAT32_MAX),)
    assert parse(logit_bias=[[5, -3e38]] * 4).sampling.logit_bias == ((5, -FLOAT32_MAX),)
    assert parse(logit_bias=[[5, False], [5, 3e38]]).sampling.logit_bias == ((5, -math.inf),)
    assert len(parse(logit_bias=[[i % 200, 1.0] for i in range(100_000)]).sampling.logit_bias) == 200


def test_adapters_are_canonical() -> None:
    assert parse(lora=[{"id": 2, "scale": 1}, {"id": 0, "scale": 0.5}, {"id": 1, "scale": 0}]).adapters.entries == (
        (0, 0.5),
        (2, 1.0),
    )


def test_empty_stop_strings_are_dropped() -> None:
    assert parse(stop="x").stop == ("x",)
    assert parse(stop=["", "x"]).stop == ("x",)


def test_a_json_schema_becomes_a_grammar_and_a_given_grammar_wins() -> None:
    assert "root ::=" in parse(json_schema={"type": "boolean"}).sampling.grammar
    assert parse(json_schema={}).sampling.grammar == parse(json_schema={"type": "object"}).sampling.grammar
    assert parse(json_schema={}, grammar='root ::= "x"').sampling.grammar == 'root ::= "x"'


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"$ref": "#/nowhere"},
        {"$ref": "https://example.com/schema.json"},
        {"type": "string", "maxLength": 10**9},
        {"type": "string", "pattern": "("},
    ],
)
def test_a_json_schema_that_cannot_be_used_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="json_schema"):
        parse(json_schema=schema)


def test_the_settings_of_a_request_are_plain_json() -> None:
    params = parse(logit_bias=[[1, False], [2, 0.1]], lora=[{"id": 1, "scale": 0.5}], grammar='root ::= "x"')
    settings = full_settings(params.generation((1,), 0), Shown())
    json.dumps(settings, allow_nan=False)
    assert settings["lora"] == [{"id": 1, "scale": 0.5}]
    assert settings["temperature"] == 0.800000011920929


def test_prompts_are_strings_tokens_mixtures_or_several_of_them() -> None:
    model = ByteModel()
    assert tokenize_prompts(model, "ab") == [(256, 97, 98)]
    assert tokenize_prompts(model, [97, 98]) == [(97, 98)]
    assert tokenize_prompts(model, ["a", 98]) == [(256, 97, 98)]
    assert tokenize_prompts(model, [97, "b"]) == [(97, 98)]
    assert tokenize_prompts(model, ["a", "b"]) == [(256, 97), (256, 98)]
    assert tokenize_prompts(model, ["a", [97, "b"], {"prompt_string": "c"}]) == [(256, 97), (97, 98), (256, 99)]


@pytest.mark.parametrize("prompt", [[], 5, True, {}, [None], [[1.5]], ["a", [[1]]], [257], [-1], {"prompt_string": 5}])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        tokenize_prompts(ByteModel(), prompt)


def test_multimodal_prompts_are_not_supported() -> None:
    with pytest.raises(NotSupported):
        tokenize_prompts(ByteModel(), {"prompt_string": "x", "multimodal_data": [""]})


def test_special_tokens_are_added_to_a_leading_string_only() -> None:
    mixed = tokenize_mixed(ByteModel(), ["a", 98, "c"], "content", add_special=True, parse_special=False)
    assert mixed == [256, 97, 98, 99]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"{", "parse error at line 1, column 2"),
        (b'{"a": }', "parse error at line 1, column 7"),
        (b"", "parse error at line 1, column 1"),
        (b"\xff", "parse error"),
        (b'{"a": NaN}', "NaN is not valid JSON"),
        (b'{"a": ' + b"[" * 100_000, "parse error"),
        (b'{"a": ' + b"1" * 100_000 + b"}", "parse error"),
        (b"[]", "must be a JSON object"),
        (b'{"a": "\\ud800"}', "lone surrogate"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused_with_the_place_where_it_breaks(raw: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_json_object(raw)
    assert message in caught.value.message
    assert len(caught.value.message) < 300


def test_escaped_text_is_accepted() -> None:
    assert parse_json_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}
