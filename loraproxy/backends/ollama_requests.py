"""llama-server's and OpenAI's completion requests as requests to Ollama's API.

Ollama's defaults differ from llama-server's, so every option is sent, with llama-server's default where the request has
none: the same request samples alike whatever runs it. What Ollama cannot do is refused with 501 and the field's name,
unless its value asks for nothing; it would otherwise be ignored in silence (assumption 10 of
:mod:`loraproxy.backends.ollama_api`). Fields that llama-server itself does not know are ignored, as there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from loraproxy.errors import InvalidRequest, NotSupported

_INTEGERS = {
    "top_k": ("top_k", 40),
    "repeat_last_n": ("repeat_last_n", 64),
    "seed": ("seed", -1),
    "n_keep": ("num_keep", 0),
}
"""llama-server's field to Ollama's option, and llama-server's default (common/common.h)."""
_NUMBERS = {
    "temperature": 0.8,
    "top_p": 0.95,
    "min_p": 0.05,
    "typical_p": 1.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Of the same name on both sides."""
_LIMITS = ("n_predict", "max_completion_tokens", "max_tokens")
_RANDOM_SEED = 0xFFFFFFFF
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("dynatemp_range", "xtc_probability", "dry_multiplier", "mirostat", "n_probs", "min_keep"), (0,)),
    **dict.fromkeys(("n_discard", "n_indent"), (0,)),
    **dict.fromkeys(("n", "n_cmpl", "best_of"), (1,)),
    **dict.fromkeys(("logprobs", "top_logprobs"), (0,)),
    **dict.fromkeys(("ignore_eos", "post_sampling_probs", "return_tokens", "return_progress"), (False,)),
    **dict.fromkeys(("timings_per_token", "grammar_lazy", "echo", "continue_final_message"), (False,)),
    **dict.fromkeys(("grammar", "suffix"), ("",)),
    **dict.fromkeys(("logit_bias",), ([], {})),
    **dict.fromkeys(("response_fields", "samplers"), ([],)),
    "add_generation_prompt": (True,),
}
"""Fields that Ollama has nothing for, and the values that ask for nothing; ``null`` does so always."""
_OFF_BELOW = ("top_n_sigma", "adaptive_target", "t_max_predict_ms")
"""The same; they ask for nothing from zero down."""
_MEDIA = {"image_url": "image", "input_audio": "audio", "input_video": "video", "video_url": "video"}


def completion_request(body: Mapping[str, Any], model: str) -> dict[str, Any]:
    """A request of ``/completion`` or ``/v1/completions`` for ``/api/generate``, without ``stream``.

    The prompt is sent ``raw``: no template is applied to it, as in llama-server. Raises InvalidRequest and
    NotSupported, naming the field.
    """
    return {**_common(body, model), "prompt": _prompt(body.get("prompt")), "raw": True}


def chat_request(body: Mapping[str, Any], model: str) -> dict[str, Any]:
    """A request of ``/v1/chat/completions`` for ``/api/chat``, without ``stream``. Raises as completion_request."""
    messages = body.get("messages")
    if messages is None:
        raise InvalidRequest("'messages' is required")
    if not isinstance(messages, list):
        raise InvalidRequest("Expected 'messages' to be an array")
    for field in ("tools", "functions"):
        if body.get(field) and body.get("tool_choice") != "none":
            raise _no_equivalent(field)
    request = {**_common(body, model), "messages": [_message(message) for message in messages]}
    if (think := _think(body)) is not None:
        request["think"] = think
    return request


def options(body: Mapping[str, Any]) -> dict[str, Any]:
    """Ollama's options for the sampling fields of a request. Raises InvalidRequest and NotSupported."""
    for field, neutral in _NEUTRAL.items():
        value = body.get(field)
        if value is not None and value not in neutral:
            raise _no_equivalent(field)
    for field in _OFF_BELOW:
        if _number(body, field, -1.0) > 0:
            raise _no_equivalent(field)
    found: dict[str, Any] = {"num_predict": _limit(body), "stop": _stop(body.get("stop"))}
    for field, (option, integer) in _INTEGERS.items():
        found[option] = _integer(body, field, integer)
    for field, number in _NUMBERS.items():
        found[field] = _number(body, field, number)
    if found["seed"] < 0 or found["seed"] == _RANDOM_SEED:
        found["seed"] = -1
    if body.get("num_ctx") is not None:
        found["num_ctx"] = _integer(body, "num_ctx", 0)
    return found


def _common(body: Mapping[str, Any], model: str) -> dict[str, Any]:
    request: dict[str, Any] = {"model": model, "options": options(body)}
    if (form := _format(body)) is not None:
        request["format"] = form
    if body.get("keep_alive") is not None:
        request["keep_alive"] = body["keep_alive"]
    return request


def _no_equivalent(field: str) -> NotSupported:
    return NotSupported(f"Field '{field}' is not supported by the Ollama backend; leave it out")


def _wrong(field: str, expected: str, value: Any) -> InvalidRequest:
    shown = repr(value)
    return InvalidRequest(f"Field '{field}' must be {expected}, but got {shown[:80]}")


def _integer(body: Mapping[str, Any], field: str, default: int) -> int:
    value = body.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1:
        raise _wrong(field, "an integer", value)
    return int(value)


def _number(body: Mapping[str, Any], field: str, default: float) -> float:
    value = body.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _wrong(field, "a number", value)
    return float(value)


def _limit(body: Mapping[str, Any]) -> int:
    """``num_predict``: -1 is until the end of the text; 0 means that to Ollama, too, but not to llama-server."""
    field = next((field for field in _LIMITS if body.get(field) is not None), _LIMITS[0])
    limit = _integer(body, field, -1)
    if limit < -1:
        raise _wrong(field, "-1 or more", limit)
    if limit == 0:
        raise NotSupported(f"Field '{field}' must not be 0 with the Ollama backend, which cannot generate nothing")
    return limit


def _stop(value: Any) -> list[str]:
    words = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise _wrong("stop", "a string or an array of strings", value)
    return [word for word in words if word]


def _prompt(value: Any) -> str:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict):
        value = value.get("prompt_string")
    if isinstance(value, str):
        return value
    if value is None:
        raise InvalidRequest('"prompt" must be a string')
    raise NotSupported(
        "Field 'prompt': token ids and several prompts are not supported by the Ollama backend; send text"
    )


def _format(body: Mapping[str, Any]) -> Any:
    """``json``, a JSON schema, or None: from ``json_schema`` or ``response_format``."""
    schema, form = body.get("json_schema"), body.get("response_format")
    if form is not None:
        kind = form.get("type") if isinstance(form, dict) else None
        if kind == "json_object":
            schema = form.get("schema") or {}
        elif kind == "json_schema":
            inner = form.get("json_schema")
            schema = (inner.get("schema") if isinstance(inner, dict) else None) or {}
        elif kind not in (None, "", "text"):
            raise _wrong("response_format", 'of type "text", "json_object" or "json_schema"', kind)
    if schema is None:
        return None
    if not isinstance(schema, dict):
        raise _wrong("json_schema", "an object", schema)
    return schema or "json"


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequest("every message must be an object with a 'role' and a 'content'")
    if message.get("tool_calls"):
        raise _no_equivalent("tool_calls")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_text(part) for part in content)
    elif content is None:
        content = ""
    if not isinstance(content, str):
        raise InvalidRequest("Expected 'content' to be a string or an array")
    return {"role": message["role"], "content": content}


def _text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in _MEDIA:
        raise NotSupported(f"{_MEDIA[kind]} input is not supported by the Ollama backend")
    if kind != "text" or not isinstance(part.get("text"), str):
        raise InvalidRequest("unsupported content[].type")
    text: str = part["text"]
    return text


def _think(body: Mapping[str, Any]) -> bool | None:
    """Whether a model that can think is to: None where the request does not say."""
    kwargs = body.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise _wrong("chat_template_kwargs", "an object", kwargs)
    if kwargs.keys() - {"enable_thinking"}:
        raise _no_equivalent("chat_template_kwargs")
    think = kwargs.get("enable_thinking")
    if think is not None and not isinstance(think, bool):
        raise _wrong("chat_template_kwargs.enable_thinking", "true or false", think)
    effort = body.get("reasoning_effort")
    if effort not in (None, "none"):
        raise _no_equivalent("reasoning_effort")
    return False if effort == "none" else think
