"""One request's sampler chain, built from llama.cpp's samplers as llama-server builds it.

Source for the order and the defaults: common_sampler_init in llama.cpp's common/sampling.cpp.
"""

from __future__ import annotations

import ctypes
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

import llama_cpp

from loraproxy.errors import InvalidRequest
from loraproxy.worker.model import Model
from loraproxy.worker.types import SamplingParams

DEFAULT_SEED = 0xFFFFFFFF

_Build = Callable[[Model, SamplingParams, int], "llama_cpp.llama_sampler_p"]


def _dry(model: Model, p: SamplingParams, n_ctx: int) -> llama_cpp.llama_sampler_p:
    breakers = [b.encode() for b in p.dry_sequence_breakers]
    array = (ctypes.c_char_p * len(breakers))(*breakers)
    last_n = _window(p.dry_penalty_last_n, n_ctx)
    return llama_cpp.llama_sampler_init_dry(
        model.vocab, p.dry_multiplier, p.dry_base, p.dry_allowed_length, last_n, array, len(breakers)
    )


def _window(last_n: int, n_ctx: int) -> int:
    """Tokens to look back on; llama.cpp reserves memory for them, so no more than there can be."""
    return n_ctx if last_n < 0 else min(last_n, n_ctx)


def _penalties(model: Model, p: SamplingParams, n_ctx: int) -> llama_cpp.llama_sampler_p:
    last_n = _window(p.repeat_last_n, n_ctx)
    return llama_cpp.llama_sampler_init_penalties(
        model.n_vocab, last_n, p.repeat_penalty, p.frequency_penalty, p.presence_penalty
    )


SAMPLERS: dict[str, _Build] = {
    "penalties": _penalties,
    "dry": _dry,
    "top_n_sigma": lambda m, p, n: llama_cpp.llama_sampler_init_top_n_sigma(p.top_n_sigma),
    "top_k": lambda m, p, n: llama_cpp.llama_sampler_init_top_k(p.top_k),
    "typ_p": lambda m, p, n: llama_cpp.llama_sampler_init_typical(p.typical_p, p.min_keep),
    "top_p": lambda m, p, n: llama_cpp.llama_sampler_init_top_p(p.top_p, p.min_keep),
    "min_p": lambda m, p, n: llama_cpp.llama_sampler_init_min_p(p.min_p, p.min_keep),
    "xtc": lambda m, p, n: llama_cpp.llama_sampler_init_xtc(p.xtc_probability, p.xtc_threshold, p.min_keep, p.seed),
    "temperature": lambda m, p, n: llama_cpp.llama_sampler_init_temp_ext(
        p.temperature, p.dynatemp_range, p.dynatemp_exponent
    ),
}
"""llama-server's sampler names and how each is made."""


def _changes_logits(p: SamplingParams) -> bool:
    """Whether anything but truncation and temperature acts: if not, temperature 0 is the argmax of the logits."""
    penalties = "penalties" in p.samplers and p.repeat_last_n != 0
    dry = "dry" in p.samplers and p.dry_multiplier != 0.0 and p.dry_penalty_last_n != 0
    return bool(
        p.logit_bias
        or (penalties and (p.repeat_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0))
        or dry
        or ("xtc" in p.samplers and p.xtc_probability > 0.0)
    )


class Sampler:
    """A chain and, with a grammar, its sampler; ``close()`` frees both.

    ``chain`` and ``grammar`` are the addresses that the extension's sampling calls take (grammar 0: none).
    """

    def __init__(self, model: Model, params: SamplingParams, n_ctx: int) -> None:
        """Build the samplers. Raises InvalidRequest for a grammar that llama.cpp cannot parse."""
        if params.seed == DEFAULT_SEED:
            params = replace(params, seed=secrets.randbelow(DEFAULT_SEED))
        self.params = params
        self._grammar = None
        if params.grammar:
            self._grammar = llama_cpp.llama_sampler_init_grammar(model.vocab, params.grammar.encode(), b"root")
            if not self._grammar:
                raise InvalidRequest("failed to parse grammar")
        self._chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        for sampler in self._samplers(model, n_ctx):
            llama_cpp.llama_sampler_chain_add(self._chain, sampler)
        self.chain = _address(self._chain)
        self.grammar = _address(self._grammar) if self._grammar else 0

    def _samplers(self, model: Model, n_ctx: int) -> list[llama_cpp.llama_sampler_p]:
        p = self.params
        bias = list(p.logit_bias)
        if p.ignore_eos:
            bias += [(token, -math.inf) for token in model.eog_tokens]
        built = []
        if bias:
            array = (llama_cpp.llama_logit_bias * len(bias))(*[llama_cpp.llama_logit_bias(t, b) for t, b in bias])
            built.append(llama_cpp.llama_sampler_init_logit_bias(model.n_vocab, len(bias), array))
        if p.mirostat:
            built.append(llama_cpp.llama_sampler_init_temp(p.temperature))
            built.append(
                llama_cpp.llama_sampler_init_mirostat(model.n_vocab, p.seed, p.mirostat_tau, p.mirostat_eta, 100)
                if p.mirostat == 1
                else llama_cpp.llama_sampler_init_mirostat_v2(p.seed, p.mirostat_tau, p.mirostat_eta)
            )
        elif p.temperature <= 0.0 and "temperature" in p.samplers and not bias and not _changes_logits(p):
            built.append(llama_cpp.llama_sampler_init_greedy())
        else:
            built += [SAMPLERS[name](model, p, n_ctx) for name in p.samplers]
            built.append(llama_cpp.llama_sampler_init_dist(p.seed))
        return built

    @property
    def remembers(self) -> int:
        """How many of the prompt's last tokens the chain wants to see: those that penalties look back on."""
        p = self.params
        if not _changes_logits(p) or p.mirostat:
            return 0
        return max(_back(p.repeat_last_n), _back(p.dry_penalty_last_n) if p.dry_multiplier else 0)

    def see(self, tokens: Sequence[int]) -> None:
        """Show the chain the prompt's last tokens."""
        for token in tokens:
            llama_cpp.llama_sampler_accept(self._chain, token)

    def close(self) -> None:
        """Free the samplers."""
        if self._chain:
            llama_cpp.llama_sampler_free(self._chain)
        if self._grammar:
            llama_cpp.llama_sampler_free(self._grammar)
        self._chain = self._grammar = None

    def __del__(self) -> None:
        if hasattr(self, "_chain"):  # one that nobody came to use: its client left while it was built
            self.close()


def _back(last_n: int) -> int:
    return 1 << 30 if last_n < 0 else last_n


def _address(sampler: llama_cpp.llama_sampler_p) -> int:
    return ctypes.cast(sampler, ctypes.c_void_p).value or 0
