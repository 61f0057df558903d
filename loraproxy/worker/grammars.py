"""The grammar a request asks for: GBNF as given, or converted from a JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llama_cpp.llama_grammar import json_schema_to_gbnf

from loraproxy.errors import InvalidRequest
from loraproxy.worker.fields import wrong
from loraproxy.worker.grammar_check import MAX_REPETITIONS, check_grammar

_REPETITIONS = ("minLength", "maxLength", "minItems", "maxItems")


def _check_repetitions(schema: Any) -> None:
    """Refuse counts that would be unrolled into a grammar too large to use. Raises InvalidRequest."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            for key in _REPETITIONS:
                count = node.get(key)
                if isinstance(count, (int, float)) and count > MAX_REPETITIONS:
                    raise InvalidRequest(f"\"json_schema\": '{key}' must be at most {MAX_REPETITIONS}, but got {count}")
            pending += node.values()
        elif isinstance(node, list):
            pending += node


def grammar_of_schema(schema: Any) -> str:
    """The GBNF grammar of a JSON schema; an empty schema means any object. Raises InvalidRequest."""
    if not isinstance(schema, (dict, bool)):
        raise wrong("json_schema", "an object", schema)
    if schema == {}:
        schema = {"type": "object"}
    _check_repetitions(schema)
    try:
        grammar: str = json_schema_to_gbnf(json.dumps(schema))
    except RecursionError:
        raise InvalidRequest('"json_schema": nested too deeply') from None
    except Exception as error:  # the converter raises whatever its lookups raise
        raise InvalidRequest(f'"json_schema": {error or type(error).__name__}') from error
    return grammar


def requested_grammar(data: Mapping[str, Any]) -> str:
    """The grammar of a request's ``grammar`` or ``json_schema`` field (``grammar`` wins, as in llama-server).

    Returns "" where neither is given. Raises InvalidRequest.
    """
    grammar = data.get("grammar")
    if grammar is not None:
        if not isinstance(grammar, str):
            raise wrong("grammar", "a string in GBNF", grammar)
    else:
        schema = data.get("json_schema")
        grammar = "" if schema is None else grammar_of_schema(schema)
    if grammar:
        check_grammar(grammar)
    return grammar
