"""From a request's JSON object to how it is to be completed: llama-server's fields, aliases, limits and defaults.

The table of fields is that of ``make_llama_cmpl_schema`` in tools/server/server-schema.cpp. Fields that it does
not have are ignored, as there; fields that it has and this server has not are refused with 501, unless their
value asks for nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from loraproxy.adapters.sets import BASE, AdapterSet
from loraproxy.errors import InvalidRequest, NotSupported
from loraproxy.worker.fields import FLOAT32_MAX, INT32_MAX, Fields, as_integer, as_number, as_strings, shown, wrong
from loraproxy.worker.grammars import requested_grammar
from loraproxy.worker.prompts import Tokens, Vocabulary, is_token
from loraproxy.worker.types import Generation, SamplingParams

logger = logging.getLogger(__name__)

RANDOM_SEED = 0xFFFFFFFF
MAX_STOP_STRINGS = 256
MAX_SEQUENCE_BREAKERS = 64
MAX_SAMPLERS = 64
"""Each of these costs time for every token, in the thread that serves everybody."""
DEFAULTS = SamplingParams()

_SAMPLER_CHARS = {
    "d": "dry",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "s": "top_n_sigma",
    "m": "min_p",
    "t": "temperature",
    "x": "xtc",
    "e": "penalties",
    "i": "infill",
    "a": "adaptive_p",
}
_SAMPLER_NAMES = {
    spelling: name
    for name in _SAMPLER_CHARS.values()
    for spelling in (name, name.replace("_", "-"), name.replace("_", ""))
} | {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}


@dataclass(frozen=True)
class CompletionParams:
    """How every prompt of one request is to be completed and how the answers are to be shown."""

    sampling: SamplingParams
    adapters: AdapterSet
    n_predict: int
    n_keep: int
    n_discard: int
    n_cmpl: int
    """Completions for each prompt."""
    stop: tuple[str, ...]
    n_probs: int
    post_sampling_probs: bool
    cache_prompt: bool
    t_max_predict_ms: float
    stream: bool
    include_usage: bool
    return_tokens: bool
    return_progress: bool
    timings_per_token: bool
    response_fields: tuple[str, ...]

    def generation(self, prompt: Tokens, child: int) -> Generation:
        """The work for one completion of ``prompt``; each ``child`` after the first samples with another seed."""
        sampling = self.sampling
        if child and sampling.seed != RANDOM_SEED:
            sampling = replace(sampling, seed=(sampling.seed + child) % 2**32)
        return Generation(
            prompt=prompt,
            adapters=self.adapters,
            sampling=sampling,
            n_predict=self.n_predict,
            stop=self.stop,
            n_probs=self.n_probs,
            post_sampling_probs=self.post_sampling_probs,
            cache_prompt=self.cache_prompt,
            t_max_predict_ms=self.t_max_predict_ms,
            return_progress=self.return_progress and self.stream,
        )


def parse_params(
    data: Mapping[str, Any], vocab: Vocabulary, adapter_ids: Collection[int], max_completions: int
) -> CompletionParams:
    """Read and check every field of a completion request except its prompt.

    adapter_ids: the ids that ``lora`` may name. max_completions: the largest ``n_cmpl``. Raises InvalidRequest,
    or NotSupported for what llama-server can do and this server cannot.
    """
    fields = Fields(data)
    _refuse_unsupported(fields)
    return CompletionParams(
        sampling=_sampling(fields, vocab),
        adapters=_adapter_set(data.get("lora"), adapter_ids),
        n_predict=fields.integer("n_predict", "max_completion_tokens", "max_tokens", default=-1, low=-1),
        n_keep=fields.integer("n_keep", default=0, low=-1),
        n_discard=fields.integer("n_discard", default=0, low=0),
        n_cmpl=fields.integer("n_cmpl", "n", default=1, low=1, high=max_completions),
        stop=_stop_strings(data.get("stop")),
        n_probs=_n_probs(fields, vocab.n_vocab),
        post_sampling_probs=fields.flag("post_sampling_probs", False),
        cache_prompt=fields.flag("cache_prompt", True),
        t_max_predict_ms=max(0.0, fields.number("t_max_predict_ms", 0.0)),
        stream=fields.flag("stream", False),
        include_usage=Fields(fields.object("stream_options")).flag("include_usage", False),
        return_tokens=fields.flag("return_tokens", False),
        return_progress=fields.flag("return_progress", False),
        timings_per_token=fields.flag("timings_per_token", False),
        response_fields=fields.strings("response_fields"),
    )


def _refuse_unsupported(fields: Fields) -> None:
    if fields.integer("n_indent", default=0, low=0) > 0:
        raise NotSupported("Field 'n_indent' is not supported by this server")
    if fields.flag("grammar_lazy", False):
        raise NotSupported("Field 'grammar_lazy' is not supported by this server")
    if fields.number("adaptive_target", -1.0) >= 0:
        raise NotSupported("Field 'adaptive_target' is not supported by this server; leave it out or make it negative")


def _sampling(fields: Fields, vocab: Vocabulary) -> SamplingParams:
    base = DEFAULTS
    dry_base = fields.number("dry_base", base.dry_base)
    return SamplingParams(
        seed=_seed(fields),
        temperature=fields.clamped_number("temperature", base.temperature, 0.0, math.inf),
        dynatemp_range=fields.number("dynatemp_range", base.dynatemp_range),
        dynatemp_exponent=fields.number("dynatemp_exponent", base.dynatemp_exponent),
        top_k=fields.clamped_integer("top_k", base.top_k, 0, INT32_MAX),
        top_p=fields.clamped_number("top_p", base.top_p, 0.0, 1.0),
        min_p=fields.clamped_number("min_p", base.min_p, 0.0, 1.0),
        top_n_sigma=fields.number("top_n_sigma", base.top_n_sigma),
        xtc_probability=fields.clamped_number("xtc_probability", base.xtc_probability, 0.0, 1.0),
        xtc_threshold=fields.clamped_number("xtc_threshold", base.xtc_threshold, 0.0, 1.0),
        typical_p=fields.number("typical_p", base.typical_p),
        repeat_last_n=fields.integer("repeat_last_n", default=base.repeat_last_n, low=-1),
        repeat_penalty=fields.number("repeat_penalty", base.repeat_penalty),
        presence_penalty=fields.number("presence_penalty", base.presence_penalty),
        frequency_penalty=fields.number("frequency_penalty", base.frequency_penalty),
        dry_multiplier=fields.number("dry_multiplier", base.dry_multiplier),
        dry_base=dry_base if dry_base >= 1.0 else base.dry_base,
        dry_allowed_length=fields.integer("dry_allowed_length", default=base.dry_allowed_length, low=0),
        dry_penalty_last_n=fields.integer("dry_penalty_last_n", default=base.dry_penalty_last_n, low=-1),
        dry_sequence_breakers=_sequence_breakers(fields),
        mirostat=fields.clamped_integer("mirostat", base.mirostat, 0, 2),
        mirostat_tau=fields.number("mirostat_tau", base.mirostat_tau),
        mirostat_eta=fields.number("mirostat_eta", base.mirostat_eta),
        min_keep=fields.integer("min_keep", default=base.min_keep, low=0),
        logit_bias=_logit_bias(fields.data.get("logit_bias"), vocab),
        ignore_eos=fields.flag("ignore_eos", base.ignore_eos),
        grammar=requested_grammar(fields.data),
        samplers=_samplers(fields.data.get("samplers")),
    )


def _seed(fields: Fields) -> int:
    """A seed modulo 2**32, so that -1 becomes the value that draws a random one."""
    found = fields.find("seed")
    return DEFAULTS.seed if found is None else as_integer(*found) % 2**32


def _n_probs(fields: Fields, n_vocab: int) -> int:
    """``n_probs``, or OpenAI's ``logprobs`` (a number, or a boolean in chats)."""
    found = fields.find("n_probs", "logprobs")
    if found is None:
        return 0
    name, value = found
    if name == "logprobs" and isinstance(value, bool):
        return int(value)
    return max(0, min(n_vocab, as_integer(name, value)))


def _check_count(name: str, values: Collection[object], most: int) -> None:
    if len(values) > most:
        raise InvalidRequest(f"Field '{name}': {len(values)} entries, but at most {most} are taken")


def _stop_strings(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = [value]
    elif not isinstance(value, list):
        raise wrong("stop", "a string or an array of strings", value)
    _check_count("stop", value, MAX_STOP_STRINGS)
    return tuple(word for word in as_strings("stop", value) if word)


def _sequence_breakers(fields: Fields) -> tuple[str, ...]:
    found = fields.find("dry_sequence_breakers")
    if found is None:
        return DEFAULTS.dry_sequence_breakers
    breakers = as_strings(*found)
    if not breakers:
        raise wrong("dry_sequence_breakers", "a non-empty array of strings", found[1])
    _check_count("dry_sequence_breakers", breakers, MAX_SEQUENCE_BREAKERS)
    return breakers


def _samplers(value: Any) -> tuple[str, ...]:
    """The chain's order; what no sampler is called is left out with a warning, as llama-server does."""
    if value is None:
        return DEFAULTS.samplers
    if isinstance(value, str):
        known, spellings = _SAMPLER_CHARS, list(value)
    elif isinstance(value, list):
        known, spellings = _SAMPLER_NAMES, [name.lower() for name in as_strings("samplers", value)]
    else:
        raise wrong("samplers", "an array of sampler names or a string of sampler letters", value)
    _check_count("samplers", spellings, MAX_SAMPLERS)
    chain = []
    for spelling in spellings:
        name = known.get(spelling)
        if name is None:
            logger.warning("event=unknown_sampler name=%s", shown(spelling))
        elif name == "infill":
            raise NotSupported("The sampler 'infill' is not supported by this server")
        elif name != "adaptive_p":  # does nothing without an adaptive_target, which is refused
            chain.append(name)
    return tuple(chain)


def _logit_bias(value: Any, vocab: Vocabulary) -> tuple[tuple[int, float], ...]:
    """Biases by token id, from llama-server's pairs and OpenAI's object; text is tokenized, ``false`` forbids.

    Ids outside the vocabulary are left out, as in llama-server.
    """
    if value is None:
        return ()
    biases: list[tuple[int, float]] = []
    if isinstance(value, dict):
        for key, bias in value.items():
            token = int(key) if key.removeprefix("-").isdecimal() and len(key) < 12 else key
            biases += _biased(token, bias, vocab)
    elif isinstance(value, list):
        for pair in value:
            if not isinstance(pair, list) or len(pair) != 2:
                raise wrong("logit_bias", "pairs of a token and a bias", pair)
            biases += _biased(pair[0], pair[1], vocab)
    else:
        raise wrong("logit_bias", "an array of [token, bias] pairs or an object of them", value)
    total: dict[int, float] = {}
    for token, amount in biases:
        total[token] = total.get(token, 0.0) + amount
    return tuple((token, amount if amount == -math.inf else _in_float32(amount)) for token, amount in total.items())


def _in_float32(value: float) -> float:
    return max(-FLOAT32_MAX, min(FLOAT32_MAX, value))


def _biased(token: Any, bias: Any, vocab: Vocabulary) -> list[tuple[int, float]]:
    amount = -math.inf if bias is False else as_number("logit_bias", bias)
    if isinstance(token, str):
        return [(t, amount) for t in vocab.tokenize(token, add_special=False, parse_special=False)]
    if not is_token(token):
        raise wrong("logit_bias", "a token id or a string", token)
    return [(token, amount)] if 0 <= token < vocab.n_vocab else []


def _adapter_set(value: Any, adapter_ids: Collection[int]) -> AdapterSet:
    """``lora``: ``[{"id": 0, "scale": 0.5}, ...]``; absent or empty is the base model."""
    if value is None:
        return BASE
    if not isinstance(value, list):
        raise wrong("lora", 'an array of objects with "id" and "scale"', value)
    if len(value) > len(adapter_ids):
        raise InvalidRequest(f"Field 'lora': {len(value)} entries, but there are {len(adapter_ids)} adapters")
    scales = []
    for entry in value:
        if not isinstance(entry, dict) or not {"id", "scale"} <= entry.keys():
            raise wrong("lora", 'objects with "id" and "scale"', entry)
        adapter_id = as_integer("lora", entry["id"])
        if adapter_id not in adapter_ids:
            known = ", ".join(map(str, sorted(adapter_ids))) or "none"
            raise InvalidRequest(f"Field 'lora': no adapter has the id {adapter_id}; known ids: {known}")
        scales.append((adapter_id, as_number("lora", entry["scale"])))
    try:
        return AdapterSet.of(scales)
    except ValueError as error:
        raise InvalidRequest(f"Field 'lora': {error}") from None
