"""Loading and unloading adapters on a worker, over its own HTTP API."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from loraproxy.backends.base import Backend
from loraproxy.config import WorkerAdapter
from loraproxy.errors import AdapterChanged, InvalidAdapterFile, ServerError, WorkerFailed


async def load_adapter(backend: Backend, item: WorkerAdapter) -> int:
    """Have the worker load an adapter; the bytes it takes there.

    Raises InvalidAdapterFile, AdapterChanged where the file is not the one that was registered, WorkerFailed where
    the worker ended meanwhile, and ServerError.
    """
    answer = await _call(backend, "POST", "/internal/adapters", item.model_dump(mode="json"))
    return int(answer["bytes"])


async def unload_adapter(backend: Backend, wire_id: int) -> None:
    """Return when the worker has freed the adapter's memory. Raises WorkerFailed and ServerError."""
    await _call(backend, "DELETE", f"/internal/adapters/{wire_id}")


async def forget_prompts(backend: Backend, wire_id: int) -> None:
    """Drop what the worker's prompt cache has of an adapter. Raises WorkerFailed and ServerError."""
    await _call(backend, "DELETE", f"/internal/adapters/{wire_id}/prompts")


async def _call(backend: Backend, method: str, path: str, body: Any = None) -> Any:
    try:
        async with backend.session.request(method, backend.base_url + path, json=body) as response:
            status, answer = response.status, json.loads(await response.read())
    except (aiohttp.ClientError, ConnectionError) as error:
        raise WorkerFailed("the worker ended while it loaded an adapter; try again") from error
    if status == 200:
        return answer
    message = str(answer["error"]["message"])
    kind = {400: InvalidAdapterFile, AdapterChanged.status: AdapterChanged}.get(status, ServerError)
    raise kind(message)
