"""The worker beside a real llama-server: the same requests, the same statuses, keys and types of the answers.

Values are compared where they must agree: token ids, texts of templates, counts, and why an answer ended.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from cases import CASES, DIFFERENCES, NEWER_DEFAULTS, NEWER_KEYS, NEWER_METRICS, Case

from servers import Server


def kind(value: Any) -> str:
    """The JSON type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return "string" if isinstance(value, str) else type(value).__name__


def leaves(value: Any, path: str = "$") -> dict[str, set[str]]:
    """The types found at every path; all items of an array share one path."""
    found: dict[str, set[str]] = {path: {kind(value)}}
    if isinstance(value, dict):
        inner = [leaves(item, f"{path}.{key}") for key, item in value.items()]
    elif isinstance(value, list):
        inner = [leaves(item, f"{path}[]") for item in value]
    else:
        inner = []
    for part in inner:
        for key, kinds in part.items():
            found.setdefault(key, set()).update(kinds)
    return found


def at(value: Any, path: str) -> Any:
    """The value at ``path``, arrays as lists of what their items have there."""
    if path == "$" or not path:
        return value
    if path.startswith("[]"):
        return [at(item, path[2:]) for item in value]
    key, dot, rest = path.removeprefix(".").partition(".")
    if key.endswith("[]"):
        return [at(item, dot + rest) for item in value[key[:-2]]]
    return at(value[key], dot + rest)


def allowed(case: Case, path: str) -> bool:
    """True where a difference at ``path`` is on purpose."""
    patterns = [key.split(": ")[-1] for key in DIFFERENCES if ": " not in key or key.startswith(f"{case.name}: ")]
    return any(path == pattern or path.startswith((f"{pattern}.", f"{pattern}[")) for pattern in patterns)


def events(data: bytes) -> list[Any]:
    """The server-sent events in ``data``; ``[DONE]`` as a string.

    llama-server sends ``null`` where the prompt of a second generation begins; that says nothing.
    """
    blocks = [block for block in data.decode().split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks), data
    texts = [block.removeprefix("data: ") for block in blocks]
    return [text if text == "[DONE]" else json.loads(text) for text in texts if text != "null"]


def newer_than(peer: Server) -> frozenset[str]:
    """The keys that this llama-server does not know yet."""
    props = peer.request("GET", "/props")[2].decode()
    return frozenset(key for key in NEWER_KEYS if f'"{key}"' not in props)


def without_keys(value: Any, keys: frozenset[str]) -> Any:
    """``value`` without the object members named ``keys``, at any depth."""
    if isinstance(value, dict):
        return {key: without_keys(item, keys) for key, item in value.items() if key not in keys}
    return [without_keys(item, keys) for item in value] if isinstance(value, list) else value


def sequence(case: Case, stream: list[Any]) -> list[dict[str, set[str]]]:
    """The shapes of a stream's events in their order, repetitions as one; sorted where the order may change."""
    shapes: list[dict[str, set[str]]] = []
    for event in stream:
        shape = without_differences(case, leaves(event))
        if shape not in (shapes if case.interleaved else shapes[-1:]):
            shapes.append(shape)
    return sorted(shapes, key=lambda shape: sorted(shape)) if case.interleaved else shapes


def without_differences(case: Case, shape: dict[str, set[str]]) -> dict[str, set[str]]:
    return {path: kinds for path, kinds in shape.items() if not allowed(case, path)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_worker_answers_as_llama_server_does(worker: Server, llama_server: Server, case: Case) -> None:
    ours, theirs = (server.request(case.method, case.path, case.raw()) for server in (worker, llama_server))
    if not allowed(case, "status"):
        assert (ours[0], ours[1]) == (theirs[0], theirs[1]), (ours[2][:400], theirs[2][:400])
    if ours[1] == "text/event-stream":
        stream = without_keys(events(ours[2]), newer_than(llama_server))
        assert sequence(case, stream) == sequence(case, events(theirs[2]))
        return
    newer = newer_than(llama_server)
    mine, real = without_keys(json.loads(ours[2]), newer), json.loads(theirs[2])
    assert without_differences(case, leaves(mine)) == without_differences(case, leaves(real))
    if newer:
        mine, real = (without_keys(answer, frozenset(NEWER_DEFAULTS)) for answer in (mine, real))
    for path in case.equal:
        if not allowed(case, path):
            assert pruned(case, at(mine, path.removeprefix("$")), path) == pruned(
                case, at(real, path.removeprefix("$")), path
            )


def pruned(case: Case, value: Any, path: str) -> Any:
    """``value`` without what differs on purpose."""
    if isinstance(value, dict):
        return {
            key: pruned(case, item, f"{path}.{key}")
            for key, item in value.items()
            if not allowed(case, f"{path}.{key}")
        }
    if isinstance(value, list):
        return [pruned(case, item, f"{path}[]") for item in value]
    return value


def test_metrics_have_the_same_names_and_kinds(worker: Server, llama_server: Server) -> None:
    def kinds(server: Server) -> dict[str, str]:
        status, content_type, body = server.request("GET", "/metrics")
        assert (status, content_type) == (200, "text/plain; version=0.0.4")
        lines = [line.split() for line in body.decode().splitlines() if line.startswith("# TYPE")]
        return {name: kind for _, _, name, kind in lines if "spec_decode" not in name}

    ours, theirs = kinds(worker), kinds(llama_server)
    assert {name: kind for name, kind in ours.items() if name in theirs or name not in NEWER_METRICS} == theirs
