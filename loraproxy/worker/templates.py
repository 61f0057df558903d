"""A model's chat template: Jinja, in a sandbox, with what Hugging Face's and llama.cpp's templates expect.

What a template gets to see and how its result is trimmed follows ``common_chat_template_direct_apply_impl`` in
llama.cpp's common/chat.cpp; the Jinja extensions follow ``Jinja2ChatFormatter`` of llama-cpp-python.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loraproxy.errors import InvalidRequest

Message = dict[str, Any]

CHATML = (
    "{%- for message in messages -%}\n"
    "  {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n"
    "  {{- '<|im_start|>assistant\n' -}}\n"
    "{%- endif -%}"
)
"""For models without a template, as in llama.cpp."""

_MARKER = "CONTENT_MARKER"


class GenerationTag(Extension):
    """``{% generation %}``, which Hugging Face uses to mask training data, passes its content through."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> Node | list[Node]:
        """The nodes between the tag and its end."""
        parser.stream.skip(1)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def joined_text(parts: Sequence[Mapping[str, Any]]) -> str:
    """Content parts of type text as one string, a newline between them."""
    return "\n".join(str(part.get("text", "")) for part in parts)


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str | None, bos_text: str, eos_text: str, *, add_bos: bool = False) -> None:
        """Compile ``source`` (None: ChatML). Raises InvalidRequest if it is no valid Jinja.

        add_bos: the tokenizer adds BOS itself, so one at the start of a rendered prompt is cut off.
        """
        self.source = CHATML if source is None else source
        self._bos_text = bos_text
        self._eos_text = eos_text
        self._add_bos = add_bos
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(self.source)
        except TemplateError as error:
            raise InvalidRequest(f"the model's chat template is not valid Jinja: {error}") from error

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any], *, add_generation_prompt: bool) -> str:
        """The prompt for ``messages``; ``variables`` are the request's ``chat_template_kwargs``.

        Raises InvalidRequest with the template's own words if it refuses the messages or fails on them.
        """
        context: dict[str, Any] = {
            "messages": self._fitted(messages),
            "bos_token": self._bos_text,
            "eos_token": self._eos_text,
            "enable_thinking": True,
            **variables,
        }
        if add_generation_prompt:
            context["add_generation_prompt"] = True
        try:
            text = self._template.render(context)
        except Exception as error:  # a template may raise anything that its expressions raise
            raise InvalidRequest(f"chat template: {error or type(error).__name__}") from error
        if self._add_bos and self._bos_text:
            text = text.removeprefix(self._bos_text)
        return text

    def generation_prompt(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """What the template appends to open the assistant's turn."""
        without = self.render(messages, variables, add_generation_prompt=False)
        opened = self.render(messages, variables, add_generation_prompt=True)
        common = 0
        while common < min(len(without), len(opened)) and without[common] == opened[common]:
            common += 1
        return opened[common:]

    @property
    def capabilities(self) -> dict[str, bool]:
        """``chat_template_caps`` of ``GET /props``. Tools are not supported by this server, whatever the template."""
        return {
            "supports_string_content": self._takes_strings,
            "supports_typed_content": self._takes_parts,
            "supports_tools": False,
            "supports_tool_calls": False,
            "supports_parallel_tool_calls": False,
            "supports_system_role": self._takes_system,
            "supports_preserve_reasoning": False,
            "supports_reasoning_effort": "reasoning_effort" in self.source,
            "supports_object_arguments": False,
        }

    def _fitted(self, messages: Sequence[Message]) -> list[Message]:
        """Messages in the form this template takes: roles, and content as text or as parts."""
        fitted = [dict(message) for message in messages]
        for message in fitted:
            if message.get("role") == "developer" and "<|channel|>" not in self.source:
                message["role"] = "system"
            content = message.get("content")
            if isinstance(content, list) and not self._takes_parts:
                message["content"] = joined_text(content)
            elif isinstance(content, str) and not self._takes_strings:
                message["content"] = [{"type": "text", "text": content}]
        if fitted and fitted[0].get("role") == "system" and not self._takes_system:
            system = fitted.pop(0)
            if fitted:
                fitted[0]["content"] = f"{_text(system)}\n{_text(fitted[0])}"
        return fitted

    def _tries(self, messages: list[Message]) -> str:
        """What these messages give as they are; "" where the template fails."""
        try:
            return self._template.render(
                messages=messages, bos_token=self._bos_text, eos_token=self._eos_text, add_generation_prompt=True
            )
        except Exception:
            return ""

    @cached_property
    def _takes_parts(self) -> bool:
        parts = [{"type": "text", "text": _MARKER}]
        rendered = self._tries([{"role": "user", "content": parts}])
        return _MARKER in rendered and str(parts) not in rendered

    @cached_property
    def _takes_strings(self) -> bool:
        return not self._takes_parts or _MARKER in self._tries([{"role": "user", "content": _MARKER}])

    @cached_property
    def _takes_system(self) -> bool:
        user = "x" if self._takes_strings else [{"type": "text", "text": "x"}]
        system = _MARKER if self._takes_strings else [{"type": "text", "text": _MARKER}]
        return _MARKER in self._tries([{"role": "system", "content": system}, {"role": "user", "content": user}])


def _text(message: Message) -> str:
    content = message.get("content")
    return joined_text(content) if isinstance(content, list) else str(content or "")
