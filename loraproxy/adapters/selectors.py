"""From a request's fields to the adapter set it runs under.

In order of precedence: ``lora``; ``parameters.adapter_id`` or ``adapter_id`` (LoRAX and TGI clients); ``model``
as an adapter's name or ``base:adapter``; the URL ``/lora/NAME/…``; the registry's default scales.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from loraproxy.adapters.names import BASE_WORD, known_names, shorten
from loraproxy.adapters.registry import AdapterRegistry, RegisteredAdapter
from loraproxy.adapters.sets import BASE, AdapterSet
from loraproxy.errors import InvalidRequest

MAX_ENTRIES = 32
"""More adapters than this in one request are refused."""

_FORMS = (
    'use [{"id": 0, "scale": 0.5}], [{"name": "NAME", "scale": 1.0}], "NAME", ["NAME", "NAME"], {"NAME": 0.7}, '
    'or "none" for the base model'
)
_WORD = re.compile(r"[^-_.:/\\ ]+")
_TAG_WORD = re.compile(
    r"v?\d+|\d+[bkm]|\d+x\d+b|[ae]\d+b|i?q\d+|[bm]?x?fp?\d+|u?d|xs|s|m|l|xl|xxs|k|nl"
    r"|latest|default|base|instruct|it|chat|text|code|vision|thinking|reasoning|preview|qat|gguf|cloud"
)
"""A word of what stands behind the colon of a model's name."""
_ITEM_KEYS = frozenset(
    # the last four are what GET /lora-adapters shows of an adapter, so that its answer may be sent back
    ("id", "name", "scale", "path", "task_name", "prompt_prefix", "alora_invocation_string", "alora_invocation_tokens")
)


def resolve(
    body: Mapping[str, Any],
    url_adapter: str | None,
    registry: AdapterRegistry,
    base_names: Collection[str],
    strict_models: bool,
) -> AdapterSet:
    """The adapter set a request runs under.

    body: the request's JSON object; url_adapter: NAME of a ``/lora/NAME/…`` URL; base_names: what the base model
    is called. Every selector present is checked, then the first in order of precedence decides. Raises
    UnknownAdapter for an unknown name or id, in ``base:adapter`` too, InvalidRequest for anything malformed, and for
    an unknown ``model`` if ``strict_models``.
    """
    choices = (
        parse_lora(body.get("lora"), registry),
        _from_adapter_id(body, registry),
        _from_model(body.get("model"), registry, base_names, strict_models),
        None if url_adapter is None else _from_name(url_adapter, registry),
    )
    return next((choice for choice in choices if choice is not None), registry.default_set())


def parse_lora(value: Any, registry: AdapterRegistry) -> AdapterSet | None:
    """The set that a ``lora`` field, in any of its forms, means; None if it is absent (``null``).

    As in llama-server, adapters that are not listed have scale 0. Raises InvalidRequest and UnknownAdapter.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return _from_name(value, registry)
    if isinstance(value, Mapping):
        _check_count(value)
        if value and not any(key in registry for key in value) and value.keys() <= _ITEM_KEYS:
            raise InvalidRequest(f"lora is one object; put it into a list: {_FORMS}")
        return _set_of((registry.by_name(key), _scale(scale, f"lora[{shorten(key)}]")) for key, scale in value.items())
    if isinstance(value, list):
        _check_count(value)
        return _set_of(_item(item, f"lora[{i}]", registry) for i, item in enumerate(value))
    raise InvalidRequest(f"lora must not be {_kind(value)}; {_FORMS}")


def _item(item: Any, where: str, registry: AdapterRegistry) -> tuple[RegisteredAdapter, float]:
    if isinstance(item, str):
        return registry.by_name(item), 1.0
    if not isinstance(item, Mapping):
        raise InvalidRequest(f"{where} must not be {_kind(item)}; {_FORMS}")
    if unknown := sorted(map(str, item.keys() - _ITEM_KEYS)):
        raise InvalidRequest(f'{where} has an unknown key {shorten(unknown[0])}; known are "id" or "name", and "scale"')
    if "name" not in item and "id" not in item:
        raise InvalidRequest(f'{where} has neither "id" nor "name"; {_FORMS}')
    adapter = _named(item["name"], where, registry) if "name" in item else _numbered(item["id"], where, registry)
    if "name" in item and "id" in item and _numbered(item["id"], where, registry) != adapter:
        raise InvalidRequest(f'{where}: "id" {item["id"]} and "name" {adapter.name!r} are different adapters; give one')
    if "scale" in item:
        return adapter, _scale(item["scale"], f"{where}.scale")
    if "name" not in item:
        raise InvalidRequest(f'{where} has an "id" but no "scale"; {_FORMS}')
    return adapter, 1.0


def _named(name: Any, where: str, registry: AdapterRegistry) -> RegisteredAdapter:
    if not isinstance(name, str):
        raise InvalidRequest(f"{where}.name must be a string, not {_kind(name)}")
    return registry.by_name(name)


def _numbered(adapter_id: Any, where: str, registry: AdapterRegistry) -> RegisteredAdapter:
    if isinstance(adapter_id, bool) or not isinstance(adapter_id, int):
        raise InvalidRequest(f"{where}.id must be a whole number, not {_kind(adapter_id)}")
    if adapter_id < 0:
        raise InvalidRequest(f"{where}.id must not be negative")
    return registry.by_id(adapter_id)


def _scale(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequest(f"{where} must be a number, not {_kind(value)}")
    try:
        scale = float(value)
    except OverflowError:
        scale = math.inf
    if not math.isfinite(scale):
        raise InvalidRequest(f"{where} must be a finite number")
    return scale


def _set_of(scales: Iterable[tuple[RegisteredAdapter, float]]) -> AdapterSet:
    by_id: dict[int, float] = {}
    for adapter, scale in scales:
        if adapter.id in by_id:
            raise InvalidRequest(f"lora names adapter {adapter.name!r} (id {adapter.id}) twice")
        by_id[adapter.id] = scale
    try:
        return AdapterSet.of(by_id)
    except ValueError as error:
        raise InvalidRequest(f"lora: {error} that a float32 can hold") from None


def _from_name(name: str, registry: AdapterRegistry) -> AdapterSet:
    return BASE if name == BASE_WORD else AdapterSet.of({registry.by_name(name).id: 1.0})


def _from_adapter_id(body: Mapping[str, Any], registry: AdapterRegistry) -> AdapterSet | None:
    parameters = body.get("parameters")
    sources = (("parameters.adapter_id", parameters), ("adapter_id", body))
    for where, source in sources:
        value = source.get("adapter_id") if isinstance(source, Mapping) else None
        if value is None:
            continue
        if not isinstance(value, str):
            raise InvalidRequest(f"{where} must be an adapter's name, not {_kind(value)}")
        return _from_name(value, registry)
    return None


def _from_model(
    model: Any, registry: AdapterRegistry, base_names: Collection[str], strict_models: bool
) -> AdapterSet | None:
    """None where ``model`` selects nothing: absent, the base model's own name, or (as in llama-server) unknown."""
    if model is None or (isinstance(model, str) and model in base_names):
        return None
    if isinstance(model, str):
        if model in registry:
            return _from_name(model, registry)
        base, colon, adapter = _after_base(model, base_names)
        names_base = colon and base in base_names
        if names_base and (adapter in registry or adapter == BASE_WORD or not _is_tag(adapter, base_names)):
            return _from_name(adapter, registry)
    if strict_models:
        name = model if isinstance(model, str) else ""
        raise InvalidRequest(
            f"unknown model {shorten(model)}; the base model is {', '.join(sorted(base_names))}; "
            + known_names(name.rpartition(":")[2], registry.names())
        )
    return None


def _after_base(model: str, base_names: Collection[str]) -> tuple[str, str, str]:
    """The base's name, the colon and what stands behind it; split at the last colon where no base name is in front."""
    for name in sorted(base_names, key=len, reverse=True):
        if name and model.startswith(f"{name}:"):
            return name, ":", model[len(name) + 1 :]
    return model.rpartition(":")


def _is_tag(text: str, base_names: Collection[str]) -> bool:
    """True if ``text`` may be a tag of the base model, as in ``smollm2:135m-instruct-q4_0``, and not an adapter's name.

    Its words are those that Ollama's tags are made of (sizes, versions, quantisations), or of the base model's names.
    """
    own = {word for name in base_names for word in _WORD.findall(name.rpartition("/")[2].lower())}
    words = _WORD.findall(text.lower())
    return (bool(words) or not text) and all(word in own or _TAG_WORD.fullmatch(word) for word in words)


def _check_count(value: Collection[Any]) -> None:
    if len(value) > MAX_ENTRIES:
        raise InvalidRequest(f"lora has {len(value)} entries; at most {MAX_ENTRIES} adapters can run together")


def _kind(value: Any) -> str:
    """``value``'s type in JSON's words."""
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return "null" if value is None else kinds.get(type(value), type(value).__name__)
