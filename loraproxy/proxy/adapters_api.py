"""``/adapters``: what there is, and how it comes and goes; also under vLLM's two endpoints."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from loraproxy.adapters.names import shorten
from loraproxy.adapters.registry import RegisteredAdapter, Source
from loraproxy.adapters.roots import AllowedRoots
from loraproxy.errors import InvalidRequest, NotFound, ServerError
from loraproxy.proxy.body import kind, parse_object, read_body, unless_stalled
from loraproxy.proxy.catalog import Catalog, Wish
from loraproxy.proxy.changes import Changes
from loraproxy.proxy.receiving import Receiver

_MAX_DESCRIPTION = 4096
_LONGEST_JSON = 64 * 1024
_GGUF_MAGIC = b"GGUF"
_DESCRIBED_AT_ONCE = 64


@dataclass(frozen=True)
class AdminState:
    """What these handlers work with."""

    catalog: Catalog
    roots: AllowedRoots
    max_adapter_size: int
    problems: Mapping[str, str]
    """Entries of the watched folder that are no adapters to register: path and reason."""
    changes: Changes = field(default_factory=Changes)
    """Those that are under way."""


ADMIN = web.AppKey("admin", AdminState)


async def list_adapters(request: web.Request) -> web.Response:
    """``GET /adapters``: all adapters, what is loaded of them, and what in the watched folder is none."""
    state = request.app[ADMIN]
    residency = state.catalog.pool.residency
    shown = []
    for number, adapter in enumerate(state.catalog.registry):
        shown.append(describe(state.catalog, adapter))
        if number % _DESCRIBED_AT_ONCE == _DESCRIBED_AT_ONCE - 1:
            await asyncio.sleep(0)  # there are streams to serve
    return web.json_response(
        {
            "object": "list",
            "data": shown,
            "memory": {"used": residency.nbytes, "limit": residency.budget},
            "problems": [{"path": path, "error": error} for path, error in sorted(state.problems.items())],
        }
    )


async def show_adapter(request: web.Request) -> web.Response:
    """``GET /adapters/{name}``."""
    catalog = request.app[ADMIN].catalog
    return web.json_response(describe(catalog, _known(catalog, request.match_info["name"])))


async def put_adapter(request: web.Request) -> web.Response:
    """``PUT /adapters/{name}``: register or replace, by a path or by what the body holds. 201 or 200."""
    state = request.app[ADMIN]
    return await state.changes.run(_put(request, state))


async def _put(request: web.Request, state: AdminState) -> web.Response:
    name = state.catalog.checks.name(request.match_info["name"])
    created = name not in state.catalog.registry
    if _is_upload(request):
        adapter = await _receive(request, state, name)
    else:
        raw = await read_body(request)
        if raw.startswith(_GGUF_MAGIC):
            raise InvalidRequest("the body is a GGUF file; send it with Content-Type: application/octet-stream")
        try:
            parsed = parse_object(raw)
        except InvalidRequest as error:
            raise InvalidRequest(f"{error.message}; nor is it a GGUF file, which begins with 'GGUF'") from None
        body = _fields(parsed, {"path", "scale", "description"})
        path = state.roots.resolve(_text(body, "path"))
        wish = Wish(_scale(body.get("scale")), _description(body.get("description")))
        adapter = await state.catalog.register(name, path, Source.API, wish)
    return web.json_response(describe(state.catalog, adapter), status=201 if created else 200)


async def delete_adapter(request: web.Request) -> web.Response:
    """``DELETE /adapters/{name}``: requests in flight finish."""
    catalog = request.app[ADMIN].catalog
    _known(catalog, request.match_info["name"])
    adapter = await catalog.remove(request.match_info["name"])
    return web.json_response({"name": adapter.name, "id": adapter.id, "deleted": True})


async def load_lora_adapter(request: web.Request) -> web.Response:
    """vLLM's ``POST /v1/load_lora_adapter``; its words, statuses and fields (docs.vllm.ai, LoRA adapters)."""
    state = request.app[ADMIN]
    body = parse_object(await read_body(request))
    if not body.get("lora_name") or not body.get("lora_path"):
        raise InvalidRequest("Both 'lora_name' and 'lora_path' must be provided.")
    name, given = _text(body, "lora_name"), _text(body, "lora_path")
    if not _flag(body, "load_inplace") and name in state.catalog.registry:
        raise InvalidRequest(
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set"
            " 'load_inplace' to True."
        )
    state.catalog.checks.name(name)
    await state.catalog.register(name, state.roots.resolve(given), Source.API)
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


async def unload_lora_adapter(request: web.Request) -> web.Response:
    """vLLM's ``POST /v1/unload_lora_adapter``."""
    catalog = request.app[ADMIN].catalog
    body = parse_object(await read_body(request))
    if not body.get("lora_name"):
        raise InvalidRequest("'lora_name' needs to be provided to unload a LoRA adapter.")
    name = _text(body, "lora_name")
    if name not in catalog.registry:
        raise NotFound(f"The lora adapter '{name[:128]}' cannot be found.")
    await catalog.remove(name)
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


HANDLERS = {
    ("GET", "/adapters"): list_adapters,
    ("GET", "/adapters/{name}"): show_adapter,
    ("PUT", "/adapters/{name}"): put_adapter,
    ("DELETE", "/adapters/{name}"): delete_adapter,
    ("POST", "/v1/load_lora_adapter"): load_lora_adapter,
    ("POST", "/v1/unload_lora_adapter"): unload_lora_adapter,
}


def describe(catalog: Catalog, adapter: RegisteredAdapter) -> dict[str, Any]:
    """An adapter as ``GET /adapters`` shows it; sizes in bytes, times in seconds since the epoch."""
    shown: dict[str, Any] = {
        "id": adapter.id,
        "name": adapter.name,
        "description": adapter.description,
        "scale": adapter.default_scale,
        "source": adapter.source.value,
        "path": str(adapter.path),
        "state": "failed" if adapter.error else "registered",
        "error": adapter.error or None,
    }
    version = adapter.version
    if version is None:
        return shown
    summary, residency = version.summary, catalog.pool.residency
    failure = residency.failure(version)
    return {
        **shown,
        "state": "failed" if failure else residency.state(version),
        "error": failure or None,
        "leases": catalog.pool.leases(version),
        "last_used": catalog.pool.last_used(version),
        "digest": summary.digest,
        "format": summary.format,
        "size": summary.size_bytes,
        "resident_size": summary.resident_bytes,
        "rank": {"min": summary.rank[0], "max": summary.rank[1]},
        "targets": summary.n_pairs,
        "own_scale": {"min": summary.scale[0], "max": summary.scale[1]},
        "invocation_tokens": list(summary.invocation_tokens),
        "base_model": summary.base_name or None,
        "notes": list(summary.notes),
        "left_out": list(summary.left_out),
    }


def _is_upload(request: web.Request) -> bool:
    """By its Content-Type; where that says nothing, a short body is JSON and a long one a file.

    ``curl -T FILE`` sends none, and ``curl -d`` and ``--data-binary`` that of a form, whatever they send.
    """
    if "Content-Type" not in request.headers or request.content_type == "application/x-www-form-urlencoded":
        return request.content_length is None or request.content_length > _LONGEST_JSON
    return request.content_type in ("multipart/form-data", "application/octet-stream")


async def _receive(request: web.Request, state: AdminState, name: str) -> RegisteredAdapter:
    uploads = state.catalog.uploads
    state.catalog.checks.check_upload(name)
    try:
        incoming = uploads.begin()
    except OSError as error:
        raise ServerError(f"uploads cannot be stored in {uploads.folder}: {error.strerror or error}") from error
    try:
        receiver = Receiver(incoming, state.max_adapter_size)
        fields: dict[str, str] = dict(request.query)
        if request.content_type == "multipart/form-data":
            file, in_form = await unless_stalled(request, receiver.form(request))
            fields |= in_form
        else:
            file = await unless_stalled(request, receiver.body(request))
        _fields(fields, {"scale", "description"})
        wish = Wish(_scale_from_text(fields.get("scale")), _description(fields.get("description")))
        return await state.catalog.keep_upload(name, incoming, file, wish)
    finally:
        uploads.drop(incoming)


def _known(catalog: Catalog, name: str) -> RegisteredAdapter:
    """Raises NotFound in place of UnknownAdapter: here the name is the resource."""
    if name not in catalog.registry:
        raise NotFound(f"there is no adapter {shorten(name)}")
    return catalog.registry.by_name(name)


def _fields(body: dict[str, Any], known: set[str]) -> dict[str, Any]:
    if unknown := sorted(body.keys() - known):
        raise InvalidRequest(f"unknown field {shorten(unknown[0])}; known are {', '.join(sorted(known))}")
    return body


def _text(body: dict[str, Any], field: str) -> str:
    value = body.get(field)
    if value is None:
        raise InvalidRequest(f'"{field}" is required')
    if not isinstance(value, str):
        raise InvalidRequest(f'"{field}" must be a string, not {kind(value)}')
    return value


def _flag(body: dict[str, Any], field: str) -> bool:
    value = body.get(field)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f'"{field}" must be a boolean, not {kind(value)}')
    return bool(value)


def _scale(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequest(f'"scale" must be a number, not {kind(value)}')
    try:
        scale = float(value)
    except OverflowError:
        scale = math.inf
    if not math.isfinite(scale):
        raise InvalidRequest('"scale" must be a finite number')
    return scale


def _scale_from_text(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return _scale(float(text))
    except ValueError:
        raise InvalidRequest(f'"scale" must be a number, not {shorten(text)}') from None


def _description(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > _MAX_DESCRIPTION:
        raise InvalidRequest(f'"description" must be a string of at most {_MAX_DESCRIPTION} characters')
    return value
