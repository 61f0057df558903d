"""Models in memory: a llama-server for each, loaded on demand, kept for a while, evicted when another is wanted."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.servers import Server, spawn_llama_server

from .refusals import Refusal
from .store import ADAPTER, MODEL, Model

Flags = tuple[str, ...]
"""Arguments of a llama-server beside its model and context."""


@dataclass(eq=False)
class Runner:
    """One loaded model."""

    model: Model
    flags: Flags
    num_ctx: int
    server: Server
    session: aiohttp.ClientSession
    users: int = 0
    last_used: float = 0.0
    expires: float = 0.0
    """Unix time."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None

    async def ask(self, path: str, body: dict[str, Any]) -> Any:
        """A request to the llama-server; its JSON answer."""
        async with self.session.post(self.server.base_url + path, json=body) as answer:
            value = await answer.json()
            if answer.status != 200:
                raise Refusal(answer.status, value["error"]["message"])
            return value

    async def complete(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed completion; leaving early cancels it."""
        async with self.session.post(f"{self.server.base_url}/completion", json={**body, "stream": True}) as answer:
            if answer.status != 200:
                raise Refusal(answer.status, (await answer.json())["error"]["message"])
            async for line in answer.content:
                kind, _, data = line.decode().partition(": ")
                if kind == "error":
                    raise Refusal(500, json.loads(data)["message"])
                if kind == "data":
                    yield json.loads(data)

    async def close(self) -> None:
        """End the process."""
        if self.timer is not None:
            self.timer.cancel()
        await self.session.close()
        await asyncio.to_thread(self.server.stop)


class Runners:
    """All loaded models, at most ``most`` at a time."""

    def __init__(self, folder: Path, most: int, threads: int) -> None:
        """``folder`` is for the logs of the processes."""
        self._folder = folder
        self._numbers = itertools.count()
        self._most = most
        self._threads = threads
        self._loaded: dict[tuple[str, Flags], Runner] = {}
        self._lock = asyncio.Lock()
        self._expiries: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Runner]:
        return iter(sorted(self._loaded.values(), key=lambda runner: -runner.expires))

    @asynccontextmanager
    async def use(self, model: Model, num_ctx: int, keep_alive: float, flags: Flags = ()) -> AsyncIterator[Runner]:
        """The model's runner, started with ``flags``; in memory for ``keep_alive`` seconds after the block."""
        async with self._lock:
            runner = await self._ready(model, num_ctx, flags)
            runner.users += 1
            runner.idle.clear()
            if runner.timer is not None:
                runner.timer.cancel()
        runner.expires = time.time() + keep_alive
        try:
            yield runner
        finally:
            runner.users -= 1
            runner.last_used, runner.expires = time.monotonic(), time.time() + keep_alive
            if not runner.users:
                runner.idle.set()
                if keep_alive != float("inf"):
                    runner.timer = asyncio.get_running_loop().call_later(keep_alive, self._expire, runner)

    async def unload(self, digest: str) -> None:
        """Take a model out of memory as soon as nothing uses it."""
        async with self._lock:
            for runner in [runner for (of, _), runner in self._loaded.items() if of == digest]:
                await self._drop(runner)

    async def close(self) -> None:
        """End all processes."""
        for runner in tuple(self._loaded.values()):
            await runner.close()
        await asyncio.gather(*self._expiries, return_exceptions=True)

    async def _ready(self, model: Model, num_ctx: int, flags: Flags) -> Runner:
        runner = self._loaded.get((model.digest, flags))
        if runner is not None:
            if runner.num_ctx == num_ctx and runner.server.process.poll() is None:
                return runner
            await self._drop(runner)
        while len(self._loaded) >= self._most:
            waits = [asyncio.create_task(other.idle.wait()) for other in self._loaded.values()]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            oldest = min((r for r in self._loaded.values() if not r.users), key=lambda r: r.last_used, default=None)
            if oldest is not None:
                await self._drop(oldest)
        self._loaded[model.digest, flags] = runner = await self._load(model, num_ctx, flags)
        return runner

    async def _load(self, model: Model, num_ctx: int, flags: Flags) -> Runner:
        adapters = model.paths(ADAPTER)
        if len(adapters) > 1:
            raise Refusal(500, "ollama supports only one lora adapter, but multiple were provided")
        arguments = ["-m", str(model.paths(MODEL)[-1]), "-c", str(num_ctx), "-np", "1", "-t", str(self._threads)]
        arguments += [*flags, *(argument for adapter in adapters for argument in ("--lora", str(adapter)))]
        folder = self._folder / str(next(self._numbers))
        folder.mkdir(parents=True)
        server = await asyncio.to_thread(spawn_llama_server, folder, arguments)
        try:
            await asyncio.to_thread(server.wait_until_healthy)
        except BaseException as error:
            await asyncio.to_thread(server.stop)
            if isinstance(error, RuntimeError):
                raise Refusal(500, f"llama runner process has terminated: {server.last_words()[-300:]}") from None
            raise
        session = aiohttp.ClientSession(
            # llama-server closes connections as it likes, also while the next request is on its way
            connector=aiohttp.TCPConnector(force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=1 << 24,
        )
        return Runner(model, flags, num_ctx, server, session)

    async def _drop(self, runner: Runner) -> None:
        if runner.users:
            await runner.idle.wait()
        del self._loaded[runner.model.digest, runner.flags]
        await runner.close()

    def _expire(self, runner: Runner) -> None:
        async def expire() -> None:
            async with self._lock:
                if not runner.users and runner in self._loaded.values():
                    await self._drop(runner)

        task = asyncio.get_running_loop().create_task(expire())
        self._expiries.add(task)
        task.add_done_callback(self._expiries.discard)


async def text_of(runner: Runner, tokens: list[int]) -> str:
    """The text of token ids."""
    return str((await runner.ask("/detokenize", {"tokens": tokens}))["content"])


async def tokens_of(runner: Runner, text: str) -> list[int]:
    """The token ids of a prompt."""
    request = {"content": text, "add_special": True, "parse_special": True}
    return list((await runner.ask("/tokenize", request))["tokens"])
