"""Request bodies, checked as Go's encoding/json checks them against the structs of api/types.go."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from .refusals import Refusal

_GENERATION = {
    "model": "string",
    "stream": "bool",
    "options": "map[string]interface {}",
    "keep_alive": "duration",
    "format": "any",
    "think": "any",
    "logprobs": "bool",
    "top_logprobs": "int",
    "truncate": "bool",
    "shift": "bool",
}
STRUCTS: Mapping[str, Mapping[str, str]] = {
    "GenerateRequest": {
        **_GENERATION,
        "prompt": "string",
        "suffix": "string",
        "system": "string",
        "template": "string",
        "context": "[]int",
        "raw": "bool",
        "images": "[]api.ImageData",
    },
    "ChatRequest": {**_GENERATION, "messages": "[]api.Message", "tools": "[]api.Tool"},
    "Message": {
        "role": "string",
        "content": "string",
        "thinking": "string",
        "images": "[]api.ImageData",
        "tool_calls": "[]api.ToolCall",
        "tool_name": "string",
    },
    "CreateRequest": {
        "model": "string",
        "name": "string",
        "stream": "bool",
        "from": "string",
        "files": "map[string]string",
        "adapters": "map[string]string",
        "template": "string",
        "system": "string",
        "license": "any",
        "parameters": "map[string]interface {}",
        "messages": "[]api.Message",
        "quantize": "string",
    },
    "ShowRequest": {"model": "string", "name": "string", "system": "string", "verbose": "bool"},
    "DeleteRequest": {"model": "string", "name": "string"},
    "CopyRequest": {"source": "string", "destination": "string"},
    "EmbedRequest": {
        "model": "string",
        "input": "any",
        "truncate": "bool",
        "dimensions": "int",
        "options": "map[string]interface {}",
        "keep_alive": "duration",
    },
    "EmbeddingRequest": {
        "model": "string",
        "prompt": "string",
        "options": "map[string]interface {}",
        "keep_alive": "duration",
    },
}
OPTIONS = {
    **dict.fromkeys(("num_keep", "seed", "num_predict", "top_k", "repeat_last_n"), "integer"),
    **dict.fromkeys(("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread"), "integer"),
    **dict.fromkeys(("top_p", "min_p", "typical_p", "temperature", "repeat_penalty"), "float32"),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), "float32"),
    **dict.fromkeys(("use_mmap",), "boolean"),
    "stop": "array",
}
"""Option to the type its refusal names; any other option is ignored."""
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(rf"[+-]?(?:{_NUMBER}(?:ns|us|µs|ms|s|m|h))+")


async def bind(request: web.Request, struct: str) -> dict[str, Any]:
    """The request's JSON object, its known fields of the right types; ``null`` is as if the field were absent."""
    data = await request.read()
    if not data:
        raise Refusal(400, "missing request body")
    try:
        value = json.loads(data)
    except ValueError:
        shown = chr(data.lstrip()[0]) if data.strip() else "EOF"
        raise Refusal(400, f"invalid character {shown!r} looking for beginning of value") from None
    if not isinstance(value, dict):
        raise Refusal(400, f"json: cannot unmarshal {_kind(value)} into Go value of type api.{struct}")
    return _checked(value, struct)


def _checked(value: dict[str, Any], struct: str) -> dict[str, Any]:
    found = {key: item for key, item in value.items() if item is not None}
    for field, kind in STRUCTS[struct].items():
        if field in found:
            _check(found[field], kind, f"{struct}.{field}")
    for message in found.get("messages", []):
        _checked(message, "Message")
    return found


def _check(value: Any, kind: str, where: str) -> None:
    if kind == "any":
        return
    if kind == "duration":
        seconds(value)
    elif kind.startswith("[]"):
        if not isinstance(value, list):
            raise _wrong(value, where, kind)
        for item in value:
            _check_item(item, kind[2:], where)
    elif kind.startswith("map"):
        if not isinstance(value, dict):
            raise _wrong(value, where, kind)
        if kind.endswith("]string"):
            for item in value.values():
                _check_item(item, "string", where)
    else:
        _check_item(value, kind, where)


def _check_item(value: Any, kind: str, where: str) -> None:
    if kind == "api.ImageData":
        try:
            base64.b64decode(value, validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise Refusal(400, "illegal base64 data at input byte 0") from None
        return
    right = {
        "string": isinstance(value, str),
        "bool": isinstance(value, bool),
        "int": isinstance(value, int) and not isinstance(value, bool),
    }
    if not right.get(kind, isinstance(value, dict)):
        raise _wrong(value, where, kind)


def _wrong(value: Any, where: str, kind: str) -> Refusal:
    return Refusal(400, f"json: cannot unmarshal {_kind(value)} into Go struct field {where} of type {kind}")


def _kind(value: Any) -> str:
    kinds = {bool: "bool", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def seconds(value: Any) -> float:
    """A ``keep_alive``: seconds, or a text as ``5m``; negative means for ever."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise Refusal(400, f"Unsupported type: '{_kind(value)}'")
    if isinstance(value, str):
        if value in ("0", "+0", "-0"):
            return 0.0
        if not _DURATION.fullmatch(value):
            raise Refusal(400, f'time: invalid duration "{value}"')
        parts = re.findall(rf"{_NUMBER}(ns|us|µs|ms|s|m|h)", value)
        total = sum(float(number) * _UNITS[unit] for number, unit in parts)
        value = -total if value.startswith("-") else total
    return float("inf") if value < 0 else float(value)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse known options of a wrong type, as Options.FromMap does."""
    for name, kind in OPTIONS.items():
        value = options.get(name)
        if value is None:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        right = {"integer": number, "float32": number, "boolean": isinstance(value, bool)}
        if not right.get(kind, isinstance(value, list)):
            raise Refusal(500, f'option "{name}" must be of type {kind}')
        if kind == "array" and not all(isinstance(item, str) for item in value):
            raise Refusal(500, f'option "{name}" must be of an array of strings')
