"""From a chat request to a completion request: messages through the template, OpenAI's fields into llama-server's.

Follows ``oaicompat_chat_params_parse`` in tools/server/server-common.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loraproxy.errors import InvalidRequest, NotSupported
from loraproxy.worker.fields import Fields, shown, wrong
from loraproxy.worker.templates import ChatTemplate, Message, joined_text

_MEDIA = {"image_url": "image", "input_audio": "audio", "input_video": "video", "video_url": "video"}


@dataclass(frozen=True)
class ChatPrompt:
    """A chat as a completion request."""

    body: dict[str, Any]
    """The request's fields with ``prompt``, and with the chat's own fields translated."""
    prefill: str = ""
    """The start of the answer that the request gave; a whole answer repeats it."""
    streamed_prefill: str = ""
    """The same as a stream repeats it: not where ``continue_final_message`` asks for the continuation alone."""


def chat_to_completion(body: Mapping[str, Any], template: ChatTemplate) -> ChatPrompt:
    """Translate a chat request. Raises InvalidRequest, or NotSupported for tools and media."""
    _refuse_tools(body)
    translated = dict(body)
    translated |= _constraint(body)
    translated |= _logprobs(body)
    messages = _messages(body)
    variables = dict(Fields(body).object("chat_template_kwargs"))
    effort = body.get("reasoning_effort")
    if effort == "none":
        variables["enable_thinking"] = False
    elif effort is not None:
        variables["reasoning_effort"] = effort
    if not isinstance(variables.get("enable_thinking", True), bool):
        raise wrong("chat_template_kwargs.enable_thinking", "true or false", variables["enable_thinking"])
    if _continues(body, messages):
        *earlier, last = messages
        prefill = joined_text(last["content"]) if isinstance(last["content"], list) else last["content"]
        opening = template.generation_prompt(earlier, variables) + prefill
        translated["prompt"] = template.render(earlier, variables, add_generation_prompt=False) + opening
        repeats = not body.get("continue_final_message") or Fields(body).flag("echo", False)
        return ChatPrompt(translated, prefill, prefill if repeats else "")
    add = Fields(body).flag("add_generation_prompt", True)
    translated["prompt"] = template.render(messages, variables, add_generation_prompt=add)
    return ChatPrompt(translated)


def _refuse_tools(body: Mapping[str, Any]) -> None:
    for name in ("tools", "functions"):
        value = body.get(name)
        if value is not None and not isinstance(value, list):
            raise wrong(name, "an array", value)
        if value and body.get("tool_choice") != "none":
            raise NotSupported(
                f"Field '{name}' is not supported by this server; leave it out or set tool_choice to none"
            )


def _messages(body: Mapping[str, Any]) -> list[Message]:
    """The checked messages; content is a string or a list of text parts, never null."""
    if body.get("messages") is None:
        raise InvalidRequest("'messages' is required")
    messages = body["messages"]
    if not isinstance(messages, list):
        raise InvalidRequest("Expected 'messages' to be an array")
    return [_message(message) for message in messages]


def _message(message: Any) -> Message:
    if not isinstance(message, dict):
        raise wrong("messages", "objects with 'role' and 'content'", message)
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequest(f"Failed to parse messages: every message needs a 'role', a string, but got {shown(role)}")
    if "content" not in message:
        if role != "assistant":
            raise InvalidRequest("All non-assistant messages must contain 'content'")
        if "tool_calls" not in message:
            raise InvalidRequest("Assistant message must contain either 'content' or 'tool_calls'!")
    content = message.get("content")
    if content is None:
        return {**message, "content": ""}
    if isinstance(content, list):
        return {**message, "content": [_text_part(part) for part in content]}
    if not isinstance(content, str):
        raise InvalidRequest("Expected 'content' to be a string or an array")
    return dict(message)


def _text_part(part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in _MEDIA:
        raise NotSupported(f"{_MEDIA[kind]} input is not supported by this server")
    if kind != "text":
        raise InvalidRequest("unsupported content[].type")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"content[].text must be a string, but got {shown(part.get('text'))}")
    return {"type": "text", "text": part["text"]}


def _continues(body: Mapping[str, Any], messages: list[Message]) -> bool:
    """True where the last message is the start of the answer. Raises InvalidRequest for a contradiction."""
    asked = body.get("continue_final_message")
    if asked == "reasoning_content":
        raise NotSupported("continue_final_message 'reasoning_content' is not supported by this server")
    from_assistant = bool(messages) and messages[-1]["role"] == "assistant"
    if asked is True or asked == "content":
        if Fields(body).flag("add_generation_prompt", True):
            raise InvalidRequest("Cannot set both add_generation_prompt and continue_final_message to true.")
        if not messages:
            raise InvalidRequest("continue_final_message needs a message to continue")
    elif not from_assistant:
        return False
    elif len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise InvalidRequest("Cannot have 2 or more assistant messages at the end of the list.")
    if messages[-1].get("tool_calls"):
        raise InvalidRequest("Cannot continue an assistant message that contains tool calls.")
    return True


def _constraint(body: Mapping[str, Any]) -> dict[str, Any]:
    """``grammar`` and ``json_schema`` as a completion request has them, from them and ``response_format``."""
    schema, grammar = body.get("json_schema"), Fields(body).text("grammar", "")
    if schema is not None and grammar:
        raise InvalidRequest("Cannot use both json_schema and grammar")
    form = Fields(Fields(body).object("response_format"))
    kind = form.text("type", "")
    if kind == "json_object":
        if "schema" in form.data or not schema:
            schema = form.object("schema")
    elif kind == "json_schema":
        schema = Fields(form.object("json_schema")).object("schema")
    elif kind not in ("", "text"):
        raise InvalidRequest(
            f'response_format type must be one of "text", "json_object" or "json_schema", but got: {kind}'
        )
    return {"json_schema": schema, "grammar": grammar if schema is None else None}


def _logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    """``n_probs`` from OpenAI's ``logprobs`` and ``top_logprobs``."""
    fields = Fields(body)
    if fields.flag("logprobs", False):
        return {"n_probs": fields.integer("top_logprobs", default=20, low=0)}
    if body.get("top_logprobs") is not None:
        raise InvalidRequest("top_logprobs requires logprobs to be set to true")
    return {}
