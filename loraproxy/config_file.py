"""The configuration file: YAML to a checked Config, or a line for each fault that says what would be right."""

from __future__ import annotations

import reprlib
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from loraproxy.config import Config, ConfigError
from loraproxy.spelling import nearest


class _Loader(yaml.SafeLoader):
    """YAML's safe loader that refuses a key given twice, where it would keep the last one in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_config(path: Path) -> Config:
    """Read and check a YAML configuration file; its paths are relative to its folder. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {getattr(error, 'strerror', error)}") from error
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: not valid YAML: nested too deeply") from error
    except ValueError as error:  # a date that is none, say
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: should be a mapping of keys to values, not a {type(data).__name__}")
    return check_config(data, str(path)).relative_to(path.resolve().parent)


def check_config(data: Mapping[str, object], source: str, options: Mapping[str, str] | None = None) -> Config:
    """``data`` as a Config. Raises ConfigError with a line for each fault, each starting with ``source``.

    ``options`` gives the command line's name of a key, to be used in place of the key's.
    """
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        faults = [_explain(fault, options or {}) for fault in error.errors()]
        raise ConfigError("\n".join(f"{source}: {fault}" for fault in faults)) from error


_IN_YAML_WORDS = {
    "dict_type": "should be a mapping, `NAME: value` for each",
    "missing": "is missing",
    "model_attributes_type": "should be a mapping of keys to values",
    "model_type": "should be a mapping of keys to values",
    "tuple_type": "should be a list, such as [one, two]",
}
"""Faults that pydantic tells in Python's terms."""


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100


def _shorten(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _explain(fault: ErrorDetails, options: Mapping[str, str]) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    where = options.get(where, where)
    if fault["type"] == "extra_forbidden":
        return f"unknown key {where!r}{_nearest(tuple(str(part) for part in fault['loc']))}"
    message = _IN_YAML_WORDS.get(fault["type"]) or fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
    secret = "api_key" in where or (isinstance(fault["input"], Mapping) and "api_key" in fault["input"])
    # reprlib looks at no more than it shows: aliases can make a value as large as they like
    return f"{where}: {message}" if secret else f"{where}: {message} (got {_shorten(_REPR.repr(fault['input']))})"


def _nearest(loc: tuple[str, ...]) -> str:
    """The hint for an unknown key: one spelt like it beside it, else one of that name elsewhere, else all beside it."""
    name = loc[-1].replace("-", "_")
    beside = list(_model_at(loc[:-1]).model_fields)
    if close := nearest(name, beside):
        return f"; did you mean {'.'.join((*loc[:-1], close))!r}?"
    elsewhere = {key: key for key in Config.model_fields}
    for section in Config.model_fields:
        elsewhere |= {key: f"{section}.{key}" for key in _model_at((section,)).model_fields if key not in elsewhere}
    if close := nearest(name, elsewhere):
        return f"; did you mean {elsewhere[close]!r}?"
    return f"; known here: {', '.join(beside)}"


def _model_at(loc: tuple[str, ...]) -> type[BaseModel]:
    """The model that holds the keys at ``loc``; parts that are no field are names in a mapping."""
    model: type[BaseModel] = Config
    for part in loc:
        if (field := model.model_fields.get(part)) is not None:
            for candidate in (field.annotation, *get_args(field.annotation)):
                if get_origin(candidate) is None and isinstance(candidate, type) and issubclass(candidate, BaseModel):
                    model = candidate
    return model
