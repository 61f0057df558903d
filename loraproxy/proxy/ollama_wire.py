"""Ollama's API for clients of Ollama, over any worker: its requests as requests to llama-server's API.

Follows docs/api.md of Ollama, and its server (server/routes.go, api/types.go) where that is silent. Ollama's defaults
are sent along (``top_p`` 0.9, ``repeat_penalty`` 1.1 and others): a client of Ollama gets what Ollama would sample.
Options that set up Ollama itself (``num_ctx``, ``num_gpu``, …) and those it does not know are ignored, as there. The
answers' side is :mod:`loraproxy.proxy.ollama_answers`.

The fields that select an adapter (``lora``, ``adapter_id``, ``parameters``, ``model``) stay as they are in the calls.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loraproxy.errors import InvalidRequest, NotSupported

_INTEGERS = {
    "num_keep": ("n_keep", 4),
    "seed": ("seed", -1),
    "top_k": ("top_k", 40),
    "repeat_last_n": ("repeat_last_n", 64),
    "mirostat": ("mirostat", 0),
}
"""Ollama's option to llama-server's field, and Ollama's default (DefaultOptions in api/types.go)."""
_NUMBERS = {
    "temperature": 0.8,
    "top_p": 0.9,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repeat_penalty": 1.1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
}
"""Of the same name on both sides."""
_SELECTORS = ("model", "lora", "adapter_id", "parameters")
_LATEST = ":latest"
_EFFORTS = ("low", "medium", "high")
_STRINGS = ("prompt", "suffix", "system", "template")


@dataclass(frozen=True)
class Call:
    """What a worker is asked: the path of llama-server's API, and the body."""

    path: str
    body: dict[str, Any]

    @property
    def streams(self) -> bool:
        """True where the answer comes as server-sent events."""
        return bool(self.body.get("stream"))


def model_of(body: Mapping[str, Any]) -> str:
    """The model a request names, without the tag ``latest``, which Ollama's clients add. Raises InvalidRequest."""
    name = body.get("model") or body.get("name") or ""
    if not isinstance(name, str):
        raise _wrong("model", "a string", name)
    if not name:
        raise InvalidRequest("model is required")
    return name.removesuffix(_LATEST)


def asks_for_nothing(body: Mapping[str, Any]) -> str:
    """``load`` or ``unload`` for a request without a prompt or messages, which only loads or unloads; else ""."""
    if body.get("prompt") or body.get("messages"):
        return ""
    return "unload" if _seconds(body.get("keep_alive")) == 0 else "load"


def generate_call(body: Mapping[str, Any]) -> Call:
    """``/api/generate`` as a completion (``raw``), or as a chat of the system text and the prompt.

    Raises InvalidRequest for what Ollama refuses, NotSupported for what no worker can do for it.
    """
    for field in _STRINGS:
        if not isinstance(body.get(field) or "", str):
            raise _wrong(field, "a string", body[field])
    for field in ("suffix", "template", "context", "images"):
        if body.get(field):
            if body.get("raw") and field in ("template", "context"):
                raise InvalidRequest("raw mode does not support template, system, or context")
            raise _unsupported(field)
    if body.get("raw"):
        if body.get("system"):
            raise InvalidRequest("raw mode does not support template, system, or context")
        return Call("/completion", {**_common(body), **_schema(body), "prompt": body.get("prompt", "")})
    messages = [{"role": "user", "content": body.get("prompt", "")}]
    if body.get("system"):
        messages.insert(0, {"role": "system", "content": body["system"]})
    return Call("/v1/chat/completions", _chat(body, messages))


def chat_call(body: Mapping[str, Any]) -> Call:
    """``/api/chat`` as a chat completion; tools are passed on to workers that know tools. Raises as generate_call."""
    messages = body.get("messages") or []
    if not isinstance(messages, list):
        raise _wrong("messages", "an array", messages)
    chat = _chat(body, [_message(message) for message in messages])
    if body.get("tools"):
        chat["tools"] = body["tools"]
    return Call("/v1/chat/completions", chat)


def embed_call(body: Mapping[str, Any]) -> Call:
    """``/api/embed`` as an embedding request. Raises as generate_call."""
    given = body.get("input", [])
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("invalid input type")
    return Call("/v1/embeddings", {**_selectors(body), "input": texts})


def _chat(body: Mapping[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    chat: dict[str, Any] = {**_common(body), "messages": messages}
    if schema := _schema(body):
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema["json_schema"]}}
    if chat["stream"]:
        chat["stream_options"] = {"include_usage": True}
    return {**chat, **_think(body.get("think"))}


def _think(think: Any) -> dict[str, Any]:
    """llama-server's fields for whether, or how much, a model that can think is to think."""
    if think is None:
        return {}
    if isinstance(think, bool):
        return {"chat_template_kwargs": {"enable_thinking": think}}
    if think in _EFFORTS:
        return {"reasoning_effort": think}
    raise _wrong("think", 'true, false, "low", "medium" or "high"', think)


def _common(body: Mapping[str, Any]) -> dict[str, Any]:
    if body.get("logprobs") or body.get("top_logprobs"):
        raise _unsupported("logprobs")
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise _wrong("stream", "true or false", stream)
    _seconds(body.get("keep_alive"))
    return {**_selectors(body), **_options(body.get("options")), "stream": stream is not False}


def _selectors(body: Mapping[str, Any]) -> dict[str, Any]:
    kept = {field: body[field] for field in _SELECTORS if body.get(field) is not None}
    return {**kept, "model": model_of(body)}


def _options(options: Any) -> dict[str, Any]:
    given = {} if options is None else options
    if not isinstance(given, dict):
        raise _wrong("options", "an object", options)
    fields: dict[str, Any] = {}
    for option, (field, default) in _INTEGERS.items():
        fields[field] = int(_number(given, option, default, "integer"))
    for option, number in _NUMBERS.items():
        fields[option] = _number(given, option, number, "float32")
    limit = int(_number(given, "num_predict", -1, "integer"))
    fields["n_predict"] = limit if limit > 0 else -1  # 0 and below: until the end of the text
    stop = given.get("stop")
    words = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise InvalidRequest('option "stop" must be of an array of strings')
    return {**fields, "stop": words}


def _number(options: Mapping[str, Any], name: str, default: float, kind: str) -> float:
    value = options.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidRequest(f'option "{name}" must be of type {kind}')
    return value


def _schema(body: Mapping[str, Any]) -> dict[str, Any]:
    form = body.get("format")
    if form in (None, ""):
        return {}
    if form == "json":
        return {"json_schema": {"type": "object"}}
    if not isinstance(form, dict):
        raise InvalidRequest(f'invalid format: {json.dumps(form)[:80]}; expected "json" or a valid JSON Schema object')
    return {"json_schema": form}


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _wrong("messages", "objects with a role and a content", message)
    content = message.get("content") or ""
    if not isinstance(content, str):
        raise _wrong("messages.content", "a string", content)
    if message.get("images"):
        raise _unsupported("images")
    chat: dict[str, Any] = {"role": message["role"].lower(), "content": content}
    if message.get("tool_calls"):
        chat["tool_calls"] = [_tool_call(number, call) for number, call in enumerate(message["tool_calls"])]
    if message.get("tool_name"):
        chat["name"] = message["tool_name"]
    return chat


def _tool_call(number: int, call: Any) -> dict[str, Any]:
    """OpenAI's form: the arguments are JSON text, and there is an id."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise _wrong("messages.tool_calls", "objects with a function", call)
    arguments = json.dumps(function.get("arguments") or {})
    return {
        "id": call.get("id") or f"call_{number}",
        "type": "function",
        "function": {"name": function.get("name", ""), "arguments": arguments},
    }


def _seconds(keep_alive: Any) -> float:
    """The seconds of a ``keep_alive``; only whether they are 0 matters here, since workers stay as long as they do."""
    if keep_alive is None:
        return 300.0
    if isinstance(keep_alive, (int, float)) and not isinstance(keep_alive, bool):
        return float(keep_alive)
    if isinstance(keep_alive, str) and keep_alive:
        digits = keep_alive.strip("+-").rstrip("hmnsuµ")
        return 0.0 if not digits.strip("0.") else 1.0
    raise _wrong("keep_alive", 'seconds or a text such as "5m"', keep_alive)


def _unsupported(field: str) -> NotSupported:
    return NotSupported(f"'{field}' is not supported by this server; leave it out")


def _wrong(field: str, expected: str, value: Any) -> InvalidRequest:
    return InvalidRequest(f"'{field}' must be {expected}, but got {json.dumps(value)[:80]}")
