"""A llama-server's HTTP API, as far as the proxy itself asks for it: health, adapters, names, slots.

Every connection serves one request: a llama-server keeps a thread busy for each connection that a client keeps open,
and drops it after a few seconds, when a request may be under way on it. A request on a fresh connection that is
refused never reached the server, so it can go elsewhere.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

import aiohttp

from loraproxy.adapters.sets import f32
from loraproxy.errors import StartFailed, Unavailable, WorkerFailed

_ASKING = aiohttp.ClientTimeout(total=120, sock_connect=5)
"""For questions of ours; a request of a client may take as long as it likes."""
_HEALTH = aiohttp.ClientTimeout(total=10, sock_connect=5)
"""Whether it is there: it answers that beside its work."""
_PROBE = {"prompt": "a", "n_predict": 1, "cache_prompt": False, "lora": "no list"}


class Loading(Unavailable):
    """The server is there but still loads its model."""


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter as the server lists it."""

    id: int
    path: str
    scale: float
    """What it applies to requests that say nothing."""

    @property
    def stem(self) -> str:
        """The file's name without ``.gguf``, whatever system the server runs on."""
        name = PureWindowsPath(self.path).name or self.path
        return name[: -len(".gguf")] if name.lower().endswith(".gguf") else name


def match(served: Sequence[ServedAdapter], path: Path) -> ServedAdapter | None:
    """What was loaded from ``path``: the same file, else the one of its name, whatever folder the server has it in."""
    for adapter in served:
        if Path(adapter.path) == path or _same(Path(adapter.path), path):
            return adapter
    stem = ServedAdapter(0, str(path), 0.0).stem
    alike = [adapter for adapter in served if adapter.stem == stem]
    return alike[0] if len(alike) == 1 else None


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except (OSError, ValueError):
        return False


class LlamaServerClient:
    """One server at ``url``; ``session`` belongs to whoever made it."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url.rstrip("/")

    async def check_health(self) -> None:
        """Return if it is ready. Raises Loading and Unavailable."""
        status, answer = await self._ask("GET", "/health", timeout=_HEALTH)
        if status == 503:
            raise Loading(f"the llama-server at {self.url} is loading its model", retry_after=1)
        if status != 200:
            raise Unavailable(f"the server at {self.url} answered /health with {status}: {_shown(answer)}")

    async def adapters(self) -> tuple[ServedAdapter, ...]:
        """What ``GET /lora-adapters`` lists; nothing for a server without that endpoint. Raises Unavailable."""
        status, answer = await self._ask("GET", "/lora-adapters")
        if status == 404:
            return ()
        if status != 200 or not isinstance(answer, list):
            raise Unavailable(f"the server at {self.url} answered /lora-adapters with {status}: {_shown(answer)}")
        return tuple(ServedAdapter(int(a["id"]), str(a.get("path", "")), float(a.get("scale", 0.0))) for a in answer)

    async def set_scales(self, scales: Mapping[int, float]) -> None:
        """Set what requests that say nothing run under, and read it back. ``scales`` has all the server's ids.

        Raises WorkerFailed where the server has other scales afterwards, and Unavailable.
        """
        entries = [{"id": i, "scale": scale} for i, scale in scales.items()]
        status, answer = await self._ask("POST", "/lora-adapters", entries)
        found = {adapter.id: adapter.scale for adapter in await self.adapters()}
        # what is written as JSON may come back with the float32's or the double's digits
        if status != 200 or {i: f32(s) for i, s in found.items()} != {i: f32(s) for i, s in scales.items()}:
            raise WorkerFailed(
                f"the server at {self.url} did not take the scales {dict(scales)}: it answered {status}"
                f" {_shown(answer)} and has {found}"
            )

    async def takes_lora(self) -> bool:
        """Whether requests may say their adapters: llama-server b4406 (January 2025) and later.

        Those refuse a ``lora`` that is no list before they generate anything; earlier ones do not look at it, and
        generate one token. Raises Unavailable.
        """
        status, answer = await self._ask("POST", "/completion", _PROBE)
        if status == 200:
            return False
        if "lora" in json.dumps(answer):
            return True
        raise Unavailable(f"the server at {self.url} answered /completion with {status}: {_shown(answer)}")

    async def names(self) -> tuple[str, ...]:
        """What it calls its model: ids and aliases, and the file's name and stem. Raises Unavailable."""
        status, answer = await self._ask("GET", "/v1/models")
        if status != 200:
            raise Unavailable(f"the server at {self.url} answered /v1/models with {status}: {_shown(answer)}")
        found: dict[str, None] = {}
        for model in answer.get("data", []) if isinstance(answer, dict) else []:
            for name in (str(model.get("id", "")), *map(str, model.get("aliases", ()))):
                plain = PureWindowsPath(name).name
                found |= dict.fromkeys((name, plain, Path(plain).stem if plain.endswith(".gguf") else plain))
        return tuple(name for name in found if name)

    async def total_slots(self) -> int:
        """How many requests it runs at once; 1 where it does not say. Raises Unavailable."""
        status, answer = await self._ask("GET", "/props")
        slots = answer.get("total_slots") if status == 200 and isinstance(answer, dict) else None
        return slots if isinstance(slots, int) and slots > 0 else 1

    async def _ask(
        self, method: str, path: str, body: Any = None, timeout: aiohttp.ClientTimeout = _ASKING
    ) -> tuple[int, Any]:
        """The status, and the answer as JSON or else as text. Raises Unavailable."""
        try:
            async with self.session.request(method, self.url + path, json=body, timeout=timeout) as response:
                status, data = response.status, await response.read()
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            reason = "it does not answer in time" if isinstance(error, asyncio.TimeoutError) else _reason(error)
            raise Unavailable(f"the llama-server at {self.url} cannot be reached: {reason}", retry_after=2) from error
        if status == 401:
            raise StartFailed(
                f"the server at {self.url} wants an API key: give the one it was started with as --backend-api-key"
            )
        with suppress(ValueError):
            return status, json.loads(data)
        return status, data.decode("utf-8", "replace")


def new_session(api_key: str) -> aiohttp.ClientSession:
    """Connections that serve one request each, with ``api_key`` unless it is empty; nothing is decoded."""
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
    )


def _reason(error: Exception) -> str:
    inner = getattr(error, "os_error", error)
    return getattr(inner, "strerror", None) or str(inner) or type(inner).__name__


def _shown(answer: Any) -> str:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return text if len(text) <= 300 else text[:299] + "…"
