"""The requests that are sent to the worker and to a real llama-server, and where the two differ on purpose."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

USER = {"role": "user", "content": "What is the capital of France?"}
PREFILL = [USER, {"role": "assistant", "content": "It is"}]
DEVELOPER = [{"role": "developer", "content": "x"}, USER]
GREEDY = {"temperature": 0, "n_predict": 8, "seed": 1}
STREAM = {"stream": True}
PROGRESS = {"stream": True, "return_progress": True, "cache_prompt": False}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
LOGPROBS = {"logprobs": True, "top_logprobs": 2}
CHAT = {"messages": [{"role": "system", "content": "Be brief."}, USER], **GREEDY}
TEXT = {"prompt": "The capital of France is", **GREEDY}
MIXED = {"prompt": [100, " and", 200], **GREEDY}
LONG = [100] * 2000
UNICODE = "Grüße <|im_end|> 世界 🙂\n\ttab"


@dataclass(frozen=True)
class Case:
    """One request, and the paths of values that must be equal."""

    name: str
    method: str
    path: str
    body: Any = None
    equal: tuple[str, ...] = ()

    @property
    def interleaved(self) -> bool:
        """True where several generations share a stream, in no order that is the same every time."""
        return isinstance(self.body, dict) and isinstance(self.body.get("prompt"), list)

    def raw(self) -> bytes | None:
        """The request's body."""
        if self.body is None or isinstance(self.body, bytes):
            return self.body
        return json.dumps(self.body).encode()


def post(name: str, path: str, body: Any, *equal: str) -> Case:
    return Case(name, "POST", path, body, equal)


ENDED = (
    "$.stop_type",
    "$.stopping_word",
    "$.tokens_evaluated",
    "$.tokens_predicted",
    "$.truncated",
    "$.prompt",
    "$.index",
)
CHOICE = ("$.choices[].finish_reason", "$.choices[].index", "$.object", "$.model", "$.usage.prompt_tokens")
ERROR = ("$.error.code", "$.error.type")

CASES = [
    *(Case(path, "GET", path) for path in ("/health", "/v1/health")),
    Case("models", "GET", "/v1/models", None, ("$.data[].id", "$.data[].meta", "$.models[].name")),
    Case("models without v1", "GET", "/models"),
    Case("props", "GET", "/props", None, ("$.chat_template", "$.bos_token", "$.eos_token", "$.total_slots")),
    Case("slots", "GET", "/slots"),
    Case("adapters", "GET", "/lora-adapters", None, ("$",)),
    post("tokenize", "/tokenize", {"content": UNICODE}, "$"),
    post("tokenize with special", "/tokenize", {"content": UNICODE, "add_special": True, "parse_special": False}, "$"),
    post("tokenize with pieces", "/tokenize", {"content": UNICODE, "with_pieces": True}, "$"),
    post("tokenize mixed", "/tokenize", {"content": ["a b", 5, "c"]}, "$"),
    post("tokenize nothing", "/tokenize", {}, "$"),
    post("detokenize", "/detokenize", {"tokens": [1, 500, 2, 30000, 7]}, "$"),
    post("detokenize nothing", "/detokenize", {}, "$"),
    post("apply template", "/apply-template", CHAT, "$"),
    post("apply template to no system message", "/apply-template", {"messages": [USER]}, "$"),
    post("apply template without opening", "/apply-template", {**CHAT, "add_generation_prompt": False}, "$"),
    post(
        "apply template to parts",
        "/apply-template",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        "$",
    ),
    post(
        "apply template to a prefill",
        "/apply-template",
        {"messages": PREFILL},
        "$",
    ),
    post(
        "apply template to a developer",
        "/apply-template",
        {"messages": DEVELOPER},
        "$",
    ),
    post("completion", "/completion", TEXT, *ENDED, "$.generation_settings"),
    post("completions", "/completions", TEXT, *ENDED),
    post("completion with mixed prompt", "/completion", MIXED, *ENDED),
    post("completion with object prompt", "/completion", {**TEXT, "prompt": {"prompt_string": "x"}}, *ENDED),
    post("completion with tokens", "/completion", {**TEXT, "return_tokens": True}, *ENDED),
    post("completion with probabilities", "/completion", {**TEXT, "n_probs": 3}, *ENDED),
    post("completion with sampled probabilities", "/completion", {**TEXT, "n_probs": 3, "post_sampling_probs": True}),
    post("completion of several prompts", "/completion", {**TEXT, "prompt": ["a", "b"]}, "$[].index"),
    post("several completions", "/completion", {**TEXT, "n": 2}, "$[].index"),
    post(
        "completion with response fields",
        "/completion",
        {**TEXT, "response_fields": ["content", "timings/predicted_n", "generation_settings/top_k", "nothing"]},
        "$.timings/predicted_n",
    ),
    post("completion without tokens", "/completion", {**TEXT, "n_predict": 0}),
    post("completion of nothing", "/completion", {**TEXT, "prompt": ""}),
    post("completion with a stop string", "/completion", {**TEXT, "n_predict": 40, "stop": ["Paris"]}, *ENDED[:2]),
    post("completion with a grammar", "/completion", {**TEXT, "grammar": 'root ::= " yes"'}, "$.content", *ENDED[:2]),
    post("completion with a schema", "/completion", {**TEXT, "json_schema": {"type": "boolean"}, "n_predict": 20}),
    post(
        "completion with every sampler",
        "/completion",
        {
            **TEXT,
            "temperature": 0.7,
            "dynatemp_range": 0.1,
            "top_n_sigma": 1.5,
            "xtc_probability": 0.1,
            "typical_p": 0.9,
            "repeat_penalty": 1.1,
            "presence_penalty": 0.1,
            "frequency_penalty": 0.1,
            "dry_multiplier": 0.5,
            "samplers": ["top-k", "penalties", "temperature"],
            "logit_bias": [[5, 1.5], ["x", -2]],
            "ignore_eos": True,
            "min_keep": 2,
            "stop": ["zzz"],
        },
        "$.generation_settings",
    ),
    post(
        "completion with mirostat", "/completion", {**TEXT, "mirostat": 2, "temperature": 0.8}, "$.generation_settings"
    ),
    post("stream", "/completion", TEXT | STREAM),
    post("stream with probabilities", "/completion", {**TEXT, "stream": True, "n_probs": 2}),
    post("stream with timings", "/completion", {**TEXT, "stream": True, "timings_per_token": True}),
    post("stream with progress", "/completion", TEXT | PROGRESS),
    post("stream of several prompts", "/completion", {**TEXT, "prompt": ["a", "b"], "stream": True}),
    post("openai completion", "/v1/completions", TEXT, *CHOICE, "$.usage.total_tokens"),
    post(
        "openai completion with max_tokens",
        "/v1/completions",
        {"prompt": "x", "max_tokens": 2, "temperature": 0},
        *CHOICE,
    ),
    post("openai completion with logprobs", "/v1/completions", {**TEXT, "logprobs": 2}, *CHOICE),
    post("openai completions of two prompts", "/v1/completions", {**TEXT, "prompt": ["a", "b"]}, *CHOICE[:2]),
    post("openai stream", "/v1/completions", TEXT | STREAM),
    post("openai stream with logprobs", "/v1/completions", {**TEXT, "stream": True, "logprobs": 2}),
    post("openai stream with progress", "/v1/completions", TEXT | PROGRESS),
    post("chat", "/v1/chat/completions", CHAT, *CHOICE),
    post("chat without v1", "/chat/completions", CHAT, *CHOICE),
    post("chat with logprobs", "/v1/chat/completions", CHAT | LOGPROBS, *CHOICE),
    # where the object ends hangs on the rounding of the build's arithmetic
    post(
        "chat with json object",
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_object"}},
        *CHOICE[1:],
    ),
    post(
        "chat with prefill",
        "/v1/chat/completions",
        {"messages": PREFILL, **GREEDY},
        *CHOICE,
    ),
    post("chat with two choices", "/v1/chat/completions", {**CHAT, "n": 2}, *CHOICE[:3]),
    post("chat stream", "/v1/chat/completions", CHAT | STREAM),
    post(
        "chat stream with usage",
        "/v1/chat/completions",
        CHAT | USAGE,
    ),
    post(
        "chat stream with logprobs",
        "/v1/chat/completions",
        CHAT | STREAM | LOGPROBS,
    ),
    post("chat stream with timings", "/v1/chat/completions", {**CHAT, "stream": True, "timings_per_token": True}),
    post(
        "chat stream with progress",
        "/v1/chat/completions",
        CHAT | PROGRESS,
    ),
    Case("unknown path", "GET", "/nowhere", None, ("$",)),
    Case("unknown method", "GET", "/completion", None, ("$",)),
    post("no prompt", "/completion", {}, *ERROR),
    post("wrong prompt", "/completion", {"prompt": 5}, *ERROR),
    post("no prompts", "/completion", {"prompt": []}, *ERROR),
    post("invalid token", "/completion", {"prompt": [10**6]}, *ERROR),
    post("wrong type", "/completion", {**TEXT, "temperature": "hot"}, *ERROR),
    post("out of range", "/completion", {**TEXT, "n_predict": -5}, *ERROR),
    post("too many completions", "/completion", {**TEXT, "n": 1000}, *ERROR),
    post("wrong adapters", "/completion", {**TEXT, "lora": {"id": 0}}, *ERROR),
    post("wrong grammar", "/completion", {**TEXT, "grammar": "root ::= ("}, *ERROR),
    post("wrong schema", "/completion", {**TEXT, "json_schema": {"type": "nonsense"}}, *ERROR),
    post("prompt over the context", "/completion", {**TEXT, "prompt": LONG}, "$.error"),
    post("streamed prompt over the context", "/completion", {**TEXT, "prompt": LONG, "stream": True}, "$.error"),
    post("no messages", "/v1/chat/completions", {}, "$"),
    post("wrong messages", "/v1/chat/completions", {"messages": 5}, "$"),
    post("message without content", "/v1/chat/completions", {"messages": [{"role": "user"}]}, "$"),
    post("wrong response format", "/v1/chat/completions", {**CHAT, "response_format": {"type": "xml"}}, *ERROR),
    post("top_logprobs alone", "/v1/chat/completions", {**CHAT, "top_logprobs": 2}, "$"),
    post("change of properties", "/props", {}, *ERROR),
    post("save a slot", "/slots/0?action=save", {"filename": "x"}, *ERROR),
    post("rerank", "/rerank", {"query": "x", "documents": ["y"]}, *ERROR),
    post("embeddings", "/v1/embeddings", {"input": "x"}, *ERROR),
    post("broken json", "/completion", b'{"prompt": ', *ERROR),
]

DIFFERENCES: dict[str, str] = {
    "$.generation_settings.reasoning_format": "the worker never splits reasoning from content",
    "completion with every sampler: $.generation_settings.logit_bias": "ignore_eos is not shown as biases",
    "broken json: status": "400 where llama-server says 500: the request is wrong, not the server",
    "broken json: $.error": "400 where llama-server says 500: the request is wrong, not the server",
}
"""Paths that differ on purpose, each with the reason; ``name: path`` for one case, ``path`` for all."""

NEWER_KEYS = ("adaptive_target", "adaptive_decay", "supports_reasoning_effort")
"""Keys that llama-server gained after some build that these tests run beside; compared only where it has them."""

NEWER_DEFAULTS = ("dry_penalty_last_n",)
"""Keys whose default changed with them: without them, only the types are compared."""

NEWER_METRICS = frozenset({"llamacpp:prompt_tokens_cached_total"})
"""The same for metrics."""
