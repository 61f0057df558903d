"""An adapter's folder is dropped in, replaced and deleted under load; every answer is its own version's."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxies import character_arguments, running_proxy
from servers import POLL_SECONDS, Server, demo_adapters

QUESTION = {"messages": [{"role": "user", "content": "Where can I sleep tonight?"}], "temperature": 0}
SHORT = 12
"""Tokens of a request that is asked often."""
ENDLESS = 900
MORE = 12
"""Tokens that a request in flight is let say after a change was noticed."""
CHARACTERS = demo_adapters()


@pytest.fixture
def watched(tmp_path: Path, model: Path) -> Iterator[tuple[Server, Path]]:
    """A product that watches an empty folder, and has the four characters for comparison."""
    folder = tmp_path / "adapters"
    folder.mkdir()
    arguments = [*character_arguments(), "--parallel", "8", "--ctx-size", "8192", "--adapters-dir", str(folder)]
    with running_proxy(tmp_path, arguments) as server:
        yield server, folder


async def pieces(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The texts of a streamed chat answer, one for each token."""
    async for line in response.content:
        if line.startswith(b"data: {"):
            event = json.loads(line.removeprefix(b"data: "))
            assert "error" not in event, event
            if event["choices"]:
                yield event["choices"][0]["delta"].get("content") or ""


class InFlight:
    """A request that is being answered; what it hears is kept."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        assert response.status == 200
        self.speaking = asyncio.Event()
        self._response = response
        self._heard: list[str] = []
        self._wanted: int | None = None
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async for text in pieces(self._response):
            self._heard.append(text)
            if text:
                self.speaking.set()
            if self._wanted is not None and len(self._heard) >= self._wanted:
                self._response.close()
                return

    async def heard(self) -> str:
        """Listen to some more tokens, then hang up: all of the text."""
        assert not self._listening.done(), "it is in flight while the adapter changes"
        self._wanted = len(self._heard) + MORE
        await self._listening
        return "".join(self._heard)


class Client:
    """Asks chat questions, greedily."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    def _post(self, lora: str, n: int) -> Any:
        body = {**QUESTION, "lora": lora, "max_tokens": n, "ignore_eos": True, "stream": True}
        return self._session.post("/v1/chat/completions", json=body)

    async def ask(self, lora: str, n: int = SHORT) -> tuple[int, str]:
        """Status, and the answer's text or the error's message."""
        async with self._post(lora, n) as response:
            if response.status != 200:
                return response.status, (await response.json())["error"]["message"]
            return 200, "".join([text async for text in pieces(response)])

    async def beginning(self, lora: str, length: int) -> str:
        """So many characters of the answer of a request without end."""
        text = ""
        async with self._post(lora, ENDLESS) as response:
            async for piece in pieces(response):
                text += piece
                if len(text) >= length:
                    break
        return text[:length]

    async def begin(self, lora: str, count: int) -> list[InFlight]:
        """Requests without end, all of which have begun to answer."""
        requests = [InFlight(await self._post(lora, ENDLESS)) for _ in range(count)]
        await asyncio.gather(*(request.speaking.wait() for request in requests))
        return requests

    async def digest(self, name: str) -> str | None:
        """Of the adapter's current version; None: there is no such adapter."""
        async with self._session.get(f"/adapters/{name}") as response:
            adapter: dict[str, Any] = await response.json()
            return None if response.status == 404 else adapter["digest"]

    async def until_digest(self, name: str, digest: str | None) -> None:
        while await self.digest(name) != digest:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(server.base_url, timeout=timeout) as session:
        yield Client(session)


class Visitor:
    """Asks short questions one after the other until told to leave, and keeps every answer."""

    def __init__(self, client: Client, lora: str) -> None:
        self.answers: list[tuple[int, str]] = []
        self._leaving = False
        self._task = asyncio.create_task(self._visit(client, lora))

    async def _visit(self, client: Client, lora: str) -> None:
        while not self._leaving:
            self.answers.append(await client.ask(lora, SHORT))

    async def leave(self) -> list[tuple[int, str]]:
        self._leaving = True
        await self._task
        return self.answers


def swap(new: Path, place: Path) -> None:
    """Put a copy of ``new`` in ``place`` the way a deployment does: complete, by renaming."""
    fresh, old = place.with_name(".fresh"), place.with_name(".old")
    shutil.copytree(new, fresh)
    place.rename(old)
    fresh.rename(place)
    shutil.rmtree(old)


async def test_a_folder_dropped_in_replaced_and_deleted_under_load_never_mixes_versions(
    watched: tuple[Server, Path],
) -> None:
    server, folder = watched
    place = folder / "npc"
    async with client_of(server) as client:
        said = {name: await client.ask(name) for name in (*CHARACTERS, "none")}
        assert len(set(said.values())) == 5
        digests = {name: await client.digest(name) for name in CHARACTERS}
        neighbours = {name: Visitor(client, name) for name in ("bard", "none")}
        visitor = Visitor(client, "npc")

        shutil.copytree(CHARACTERS["pirate"], place)
        await client.until_digest("npc", digests["pirate"])
        in_flight = {"pirate": await client.begin("npc", 3)}
        swap(CHARACTERS["wizard"], place)
        await client.until_digest("npc", digests["wizard"])
        in_flight["wizard"] = await client.begin("npc", 2)
        assert await client.ask("npc") == said["wizard"]
        heard = {"pirate": [await request.heard() for request in in_flight["pirate"]]}

        shutil.copytree(CHARACTERS["robot"], place, dirs_exist_ok=True)  # over the old files, one after the other
        await client.until_digest("npc", digests["robot"])
        assert await client.ask("npc") == said["robot"]
        heard["wizard"] = [await request.heard() for request in in_flight["wizard"]]

        in_flight["robot"] = await client.begin("npc", 2)
        shutil.rmtree(place)
        await client.until_digest("npc", None)
        unknown = await client.ask("npc")
        assert unknown[0] == 400
        assert "unknown adapter 'npc'" in unknown[1]
        heard["robot"] = [await request.heard() for request in in_flight["robot"]]

        for name, neighbour in neighbours.items():
            assert set(await neighbour.leave()) == {said[name]}
        answers = set(await visitor.leave())
        assert {answer for answer in answers if answer[0] == 200} <= {said[n] for n in ("pirate", "wizard", "robot")}
        assert {answer for answer in answers if answer[0] not in (200, 503)} == {unknown}
        for name, texts in heard.items():
            whole = await client.beginning(name, max(map(len, texts)))
            assert all(whole.startswith(text) for text in texts), name
