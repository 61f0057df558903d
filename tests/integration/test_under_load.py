"""Many requests at once against the product itself: its worker killed under them, a flood, clients that leave."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxies import character_arguments, children, is_alive, run_to_the_end, running_proxy
from servers import STOP_SECONDS, Server, base_model, demo_adapters

CHARACTERS = ("bard", "pirate", "robot", "wizard")
GREEDY = {"temperature": 0, "seed": 1, "ignore_eos": True}
PROMPT = "The weather today is"
LONG = {**GREEDY, "prompt": PROMPT, "n_predict": 400}
PATIENCE = 60
CLIENTS = 16
FLOOD = 200
LEAVING = 500
RSS_TOLERANCE = 8 * 1024**2
"""Bytes by which a process may grow over the test, once it is warm: the allocator's, which come and go."""


class Client:
    """Requests to one server, as many at once as may be."""

    def __init__(self, server: Server, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], Any]:
        """Status, headers in lower case, and the answer, parsed where it is JSON."""
        async with self.session.request(method, self.server.base_url + path, json=body) as answer:
            headers = {name.lower(): value for name, value in answer.headers.items()}
            if headers.get("content-type", "").startswith("application/json"):
                return answer.status, headers, await answer.json()
            return answer.status, headers, await answer.text()

    async def complete(self, **body: Any) -> tuple[int, dict[str, str], Any]:
        """One completion, not streamed."""
        return await self.ask("POST", "/completion", {**GREEDY, "prompt": PROMPT, **body})

    async def stream(self, **body: Any) -> Stream:
        """One completion, streamed; its answer has begun."""
        url = self.server.base_url + "/completion"
        answer = await self.session.post(url, json={**LONG, **body, "stream": True})
        assert answer.status == 200, await answer.text()
        return Stream(answer)

    async def metric(self, name: str) -> int:
        """One of the server's metrics without labels."""
        text = (await self.ask("GET", "/metrics"))[2]
        found = re.search(rf"^{re.escape(name)} ([\d.e+]+)", text, re.MULTILINE)
        assert found, name
        return int(float(found[1]))

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Ask again until it is so; ``condition`` asks the server."""

        async def ask() -> None:
            while not await condition():
                pass

        await asyncio.wait_for(ask(), PATIENCE)


class Stream:
    """A streamed answer, event by event."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer

    async def next(self) -> Any:
        """The next event; None at the end, which must be a proper one."""
        while line := await self._answer.content.readline():
            if line.startswith(b"data: "):
                return json.loads(line.removeprefix(b"data: "))
        return None

    async def rest(self) -> list[Any]:
        """All further events."""
        found = []
        while (event := await self.next()) is not None:
            found.append(event)
        return found

    def leave(self) -> None:
        """Close the connection in the middle."""
        self._answer.close()


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[Client]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield Client(server, session)


def without_times(events: list[Any]) -> list[Any]:
    return [{key: value for key, value in event.items() if key != "timings"} for event in events]


def assert_error(event: Any) -> None:
    assert event["error"] == {
        "code": 502,
        "message": "the worker ended while it worked on this request; try again",
        "type": "server_error",
    }


def assert_ends_and_leaves_nothing(server: Server, folder: Path, workers: list[int]) -> None:
    """SIGTERM: exit 0, and no process, no socket, no file but the log."""
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(STOP_SECONDS) == 0
    assert not any(map(is_alive, workers))
    assert [path.name for path in folder.rglob("*")] == [server.log.name]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.port)) != 0


# -- the death of a worker


async def test_a_worker_killed_under_16_streams_fails_those_and_the_next_request_is_served(tmp_path, model):
    arguments = [*character_arguments(), "--parallel", str(CLIENTS), "--ctx-size", str(CLIENTS * 512)]
    with running_proxy(tmp_path, arguments) as server:
        async with client_of(server) as client:
            streams = await asyncio.gather(*(client.stream(lora=CHARACTERS[n % 4]) for n in range(CLIENTS)))
            for stream in streams:
                assert (await stream.next())["stop"] is False
            waiting = [asyncio.create_task(client.complete(lora=name, n_predict=4)) for name in CHARACTERS]

            async def all_wait() -> bool:
                return await client.metric("llamacpp:requests_deferred") == len(waiting)

            await client.until(all_wait)
            [killed] = children(server.process)
            os.kill(killed, signal.SIGKILL)
            for stream in streams:
                *before, last = await stream.rest()
                assert_error(last)
                assert not any("error" in event for event in before)
            for status, _, answer in await asyncio.gather(*waiting):
                assert status == 502
                assert_error(answer)
            body = {"messages": [{"role": "user", "content": "Where can I sleep tonight?"}], "lora": "pirate"}
            status, _, answer = await client.ask("POST", "/v1/chat/completions", {**body, "max_tokens": 12})
            assert status == 200, answer
            assert answer["choices"][0]["message"]["content"].startswith("Arr")
            [worker] = (await client.ask("GET", "/workers"))[2]["data"]
            assert (worker["state"], worker["restarts"], worker["leases"]) == ("ready", 1, 0)
            assert "killed by SIGKILL" in worker["last_error"]
            assert worker["pid"] != killed
        assert_ends_and_leaves_nothing(server, tmp_path, [killed, worker["pid"]])


async def test_of_two_keyed_workers_one_killed_under_its_streams_leaves_the_other_ones_stream_as_it_is(tmp_path, model):
    modes = ["--lora-mode", "graph", "--max-workers", "2", "--preload", "pirate", "--preload", "robot"]
    arguments = [*character_arguments(), *modes, "--parallel", str(CLIENTS), "--ctx-size", str(CLIENTS * 512)]
    own = {"lora": "robot", "n_predict": 40, "n_probs": 2, "cache_prompt": False}
    with running_proxy(tmp_path, arguments) as server:
        async with client_of(server) as client:
            pids = {w["lora"]: w["pid"] for w in (await client.ask("GET", "/workers"))[2]["data"]}
            alone = without_times(await (await client.stream(**own)).rest())
            assert len(alone) > own["n_predict"] / 2
            dying = await asyncio.gather(*(client.stream(lora="pirate") for _ in range(CLIENTS - 1)))
            for stream in dying:
                assert (await stream.next())["stop"] is False
            living = await client.stream(**own)
            begun = await living.next()
            os.kill(pids["pirate=1"], signal.SIGKILL)
            for stream in dying:
                assert_error((await stream.rest())[-1])
            assert without_times([begun, *await living.rest()]) == alone
            status, headers, _ = await client.complete(lora="pirate", n_predict=4)
            assert (status, headers["x-lora"]) == (200, "pirate=1")
            shown = (await client.ask("GET", "/workers"))[2]["data"]
            assert {w["lora"]: w["pid"] for w in shown}["robot=1"] == pids["robot=1"]
        assert_ends_and_leaves_nothing(server, tmp_path, [*pids.values(), *(w["pid"] for w in shown)])


# -- a drain, and the end


async def test_while_a_worker_is_replaced_and_the_server_then_ends_no_request_and_no_upload_is_lost(tmp_path, model):
    octets = {"Content-Type": "application/octet-stream"}
    folder = tmp_path / "uploads"
    patience = ["--drain-timeout", "4", "--upload-dir", str(folder)]
    with running_proxy(tmp_path, [*character_arguments(), *patience]) as server:
        async with client_of(server) as client:
            stream = await client.stream(lora="bard", n_predict=60)
            [before] = (await client.ask("GET", "/workers"))[2]["data"]
            assert (await client.ask("POST", f"/workers/{before['id']}/drain"))[0] == 202

            async def is_replaced() -> bool:
                status, _, answer = await client.complete(lora="pirate", n_predict=1)
                assert status == 200, answer
                return before["id"] not in [w["id"] for w in (await client.ask("GET", "/workers"))[2]["data"]]

            await client.until(is_replaced)
            assert (await stream.rest())[-1]["tokens_predicted"] == 60
            [after] = (await client.ask("GET", "/workers"))[2]["data"]
            assert (after["state"], after["restarts"]) == ("ready", 1)

            content = gguf_of("pirate", tmp_path)
            goes_on = asyncio.Event()

            async def half(ends: bool) -> AsyncIterator[bytes]:
                yield content[: len(content) // 2]
                await (goes_on.wait() if ends else asyncio.Event().wait())
                yield content[len(content) // 2 :]

            async def upload(name: str, ends: bool) -> tuple[int, Any]:
                url = f"{server.base_url}/adapters/{name}"
                async with client.session.put(url, data=half(ends), headers=octets) as answer:
                    return answer.status, await answer.json()

            good, stuck = (asyncio.create_task(upload(name, name == "good")) for name in ("good", "stuck"))
            while len(list(folder.glob(".incoming-*"))) < 2:
                await client.ask("GET", "/health")
            server.process.send_signal(signal.SIGTERM)
            while "shutting down" not in await asyncio.to_thread(server.log.read_text):
                pass
            goes_on.set()
            status, answer = await good
            assert status == 201, answer
            status, answer = await stuck
            assert (status, answer["error"]["type"]) == (503, "unavailable_error")
            assert "the server is shutting down" in answer["error"]["message"]
        assert await asyncio.to_thread(server.process.wait, STOP_SECONDS) == 0
        assert [path.parent.parent.name for path in folder.rglob("*.gguf")] == ["good"]
        assert not list(folder.glob(".incoming-*"))
        assert not any(map(is_alive, (before["pid"], after["pid"])))


def gguf_of(name: str, folder: Path) -> bytes:
    """A character as a GGUF file's content."""
    file = folder / f"{name}.gguf"
    ended = run_to_the_end("convert", str(demo_adapters()[name]), str(file), "--model", str(base_model()))
    assert ended.returncode == 0, ended.stderr
    content = file.read_bytes()
    file.unlink()
    return content


# -- a flood


async def test_in_a_flood_of_200_requests_one_for_another_adapter_waits_three_steps_at_most(product):
    """Counted in the flood's tokens: a step gives each of the four slots one."""
    slots, steps = 4, 3
    async with client_of(product) as client:
        for name in ("pirate", "robot"):
            await client.complete(lora=name, n_predict=2)
        flood = [asyncio.create_task(client.complete(lora="pirate", n_predict=2)) for _ in range(FLOOD)]

        async def all_there() -> bool:
            return await client.metric("loraproxy_requests_in_flight") >= FLOOD * 3 // 4

        await client.until(all_there)
        handed_out, left = [], []
        for _ in range(7):
            before = await client.metric("llamacpp:tokens_predicted_total")
            assert (await client.complete(lora="robot", n_predict=1))[0] == 200
            handed_out.append(await client.metric("llamacpp:tokens_predicted_total") - before - 1)
            left.append(await client.metric("loraproxy_requests_in_flight"))
        answers = await asyncio.gather(*flood)
    assert {status for status, _, _ in answers} == {200}
    assert left[-1] > 2 * slots, "the flood was over before anything was seen"
    # alone it would be none; other programs may hold up the test itself between its questions, but not every time
    assert min(handed_out) <= steps * slots
    assert max(handed_out) < left[-1], "one of them waited for the flood's end"


async def test_beyond_the_queue_requests_get_503_with_retry_after_and_those_within_are_served(product):
    room = 4 + 256
    async with client_of(product) as client:
        answers = await asyncio.gather(*(client.complete(lora="pirate", n_predict=2) for _ in range(room + 40)))
    refused = [(headers, answer) for status, headers, answer in answers if status == 503]
    assert len(refused) + sum(status == 200 for status, _, _ in answers) == room + 40
    assert 0 < len(refused) <= 40
    for headers, answer in refused:
        assert int(headers["retry-after"]) >= 1
        assert answer["error"]["type"] == "unavailable_error"
        assert "too many requests: 4 run and 256 wait" in answer["error"]["message"]


@pytest.fixture(scope="module")
def one_at_a_time(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Server]:
    """One worker that runs one adapter set at a time, with room for the flood in its queue."""
    modes = ["--lora-mode", "graph", "--max-workers", "1", "--max-queue", str(FLOOD)]
    with running_proxy(tmp_path_factory.mktemp("keyed"), [*character_arguments(), *modes]) as server:
        yield server


async def test_in_a_flood_on_a_keyed_worker_one_for_another_adapter_waits_for_three_rounds_of_requests_at_most(
    one_at_a_time,
):
    """Those that run, and one turn of the flood; the third is for what runs while the request is on its way."""
    slots, rounds = 4, 3
    async with client_of(one_at_a_time) as client:
        done = 0

        async def count() -> None:
            nonlocal done
            status, headers, _ = await client.complete(lora="pirate", n_predict=3)
            assert (status, headers["x-lora"]) == (200, "pirate=1")
            done += 1

        flood = [asyncio.create_task(count()) for _ in range(FLOOD)]

        async def has_begun() -> bool:
            return await client.metric("loraproxy_requests_in_flight") > FLOOD // 2 and done >= slots

        await client.until(has_begun)
        over = [asyncio.create_task(client.complete(lora="pirate", n_predict=1)) for _ in range(FLOOD // 4)]
        waited = []
        for _ in range(2):
            before = done
            status, headers, _ = await client.complete(lora="robot", n_predict=1)
            assert (status, headers["x-lora"]) == (200, "robot=1")
            waited.append(done - before)
        assert done < FLOOD // 2, "the flood was over before anything was seen"
        answers = await asyncio.gather(*over)
        await asyncio.gather(*flood)
    refused = [headers for status, headers, _ in answers if status == 503]
    assert len(refused) + sum(status == 200 for status, _, _ in answers) == len(over)
    assert refused
    assert all(int(headers["retry-after"]) >= 1 for headers in refused)
    assert min(waited) <= rounds * slots


# -- clients that leave


def resident(pid: int) -> int:
    """A process's resident set, in bytes."""
    shown = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True)
    return 1024 * int(shown.stdout)


async def test_500_clients_that_leave_in_the_middle_of_their_streams_leave_nothing(product):
    async with client_of(product) as client:

        async def leave(number: int) -> None:
            stream = await client.stream(lora=CHARACTERS[number % 4], n_predict=-1)
            assert (await stream.next())["stop"] is False
            stream.leave()

        async def all_leave(count: int) -> None:
            numbers = iter(range(count))

            async def one_after_another() -> None:
                for number in numbers:
                    await leave(number)

            await asyncio.gather(*(one_after_another() for _ in range(8)))
            await client.until(is_quiet)

        async def is_quiet() -> bool:
            busy = any(slot["is_processing"] for slot in (await client.ask("GET", "/slots"))[2])
            return not busy and await client.metric("loraproxy_requests_in_flight") == 0

        [worker] = children(product.process)
        await all_leave(LEAVING // 10)
        before = [resident(pid) for pid in (product.process.pid, worker)]
        await all_leave(LEAVING)
        growth = [resident(pid) - was for pid, was in zip((product.process.pid, worker), before, strict=True)]
        assert await client.metric("llamacpp:requests_processing") == 0
        assert await client.metric("llamacpp:requests_deferred") == 0
        assert await client.metric("loraproxy_leases_in_flight") == 0
        assert [a["leases"] for a in (await client.ask("GET", "/adapters"))[2]["data"]] == [0] * 4
        assert children(product.process) == [worker]
        assert max(growth) < RSS_TOLERANCE, growth
        assert (await client.complete(lora="pirate", n_predict=4))[0] == 200
