"""Loading and unloading adapters on a worker, over its own HTTP API."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from loraproxy.backends.base import AdapterHost, Backend
from loraproxy.config import WorkerAdapter, WorkerSet
from loraproxy.errors import AdapterChanged, ApiError, Conflict, InvalidAdapterFile, ServerError, WorkerFailed


async def load_adapter(backend: Backend, item: WorkerAdapter) -> int:
    """Have the worker load an adapter; the bytes it takes there.

    Raises InvalidAdapterFile, AdapterChanged where the file is not the one that was registered, WorkerFailed where
    the worker ended meanwhile, and ServerError.
    """
    if isinstance(backend, AdapterHost):
        return await backend.load_adapter(item)
    answer = await _call(backend, "POST", "/internal/adapters", item.model_dump(mode="json"))
    return int(answer["bytes"])


async def unload_adapter(backend: Backend, wire_id: int) -> None:
    """Return when the worker has freed the adapter's memory. Raises WorkerFailed and ServerError."""
    if isinstance(backend, AdapterHost):
        await backend.unload_adapter(wire_id)
    else:
        await _call(backend, "DELETE", f"/internal/adapters/{wire_id}")


async def forget_prompts(backend: Backend, wire_id: int, digest: str) -> None:
    """Drop what the worker keeps of an adapter: its prompts in the cache, or models made of it.

    ``digest``: of its content, for a worker that keeps things from one start to the next. Raises WorkerFailed and
    ServerError.
    """
    if not isinstance(backend, AdapterHost):
        await _call(backend, "DELETE", f"/internal/adapters/{wire_id}/prompts?digest={digest}")


async def change_set(backend: Backend, wanted: WorkerSet) -> int:
    """Have a graph worker run ``wanted`` and nothing else; the bytes that its adapters take there.

    Raises InvalidAdapterFile, AdapterChanged, Conflict where a request still runs on it, WorkerFailed and ServerError.
    """
    answer = await _call(backend, "PUT", "/internal/set", wanted.model_dump(mode="json"))
    return int(answer["bytes"])


async def _call(backend: Backend, method: str, path: str, body: Any = None) -> Any:
    try:
        async with backend.session.request(method, backend.base_url + path, json=body) as response:
            status, answer = response.status, json.loads(await response.read())
    except (aiohttp.ClientError, ConnectionError) as error:
        raise WorkerFailed("the worker ended while it loaded an adapter; try again") from error
    if status == 200:
        return answer
    raise _error(status, answer["error"])


def _error(status: int, error: dict[str, Any]) -> ApiError:
    message = str(error["message"])
    if status == AdapterChanged.status:  # two errors have this status
        return AdapterChanged(message) if error["type"] == AdapterChanged.type else Conflict(message)
    return InvalidAdapterFile(message) if status == InvalidAdapterFile.status else ServerError(message)
