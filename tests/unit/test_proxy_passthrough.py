import asyncio
import contextlib
import gzip
import json
import socket

import aiohttp
import pytest
from scripted_llama_server import Scripted, in_front_of
from standin import soon

from loraproxy.errors import StartFailed
from loraproxy.proxy.served import look

FILES = ("/l/pirate.gguf", "/l/robot v2.gguf", "/other/pirate.gguf")


async def until(condition):
    """Ask again until the answer is what it is to become."""

    async def ask():
        while not await condition():
            pass

    await soon(ask())


async def test_adapters_are_named_after_their_files_each_once(tmp_path):
    async with in_front_of(tmp_path, Scripted(FILES)) as front:
        async with front.request("GET", "/lora-adapters") as answer:
            listed = await answer.json()
        assert [item["name"] for item in listed] == ["pirate", "robot-v2", "pirate-2"]
        assert [item["path"] for item in listed] == list(FILES)
        async with front.request("GET", "/v1/models") as answer:
            models = (await answer.json())["data"]
        assert [model["id"] for model in models] == ["/m/base.gguf", "pirate", "robot-v2", "pirate-2"]


@pytest.mark.parametrize(
    ("path", "body", "scales"),
    [
        ("/completion", {"lora": "robot-v2"}, [0, 1, 0]),
        ("/v1/chat/completions", {"model": "base:pirate-2"}, [0, 0, 1]),
        ("/lora/pirate/infill", {}, [1, 0, 0]),
        ("/v1/responses", {"lora": {"pirate": 0.5, "robot-v2": 2}}, [0.5, 2, 0]),
        ("/completions", {}, [0, 0, 0]),
        ("/completions", {"lora": []}, [0, 0, 0]),
    ],
)
async def test_the_server_gets_the_scale_of_each_of_its_adapters(tmp_path, path, body, scales):
    server = Scripted(FILES)
    async with in_front_of(tmp_path, server) as front, front.request("POST", path, body) as answer:
        assert answer.status == 200, await answer.text()
        method, target, _, data = server.received[-1]
        assert (method, target) == ("POST", path.removeprefix("/lora/pirate"))
        assert json.loads(data)["lora"] == [{"id": i, "scale": scale} for i, scale in enumerate(scales)]


async def test_ollamas_requests_are_chats_of_the_server_under_its_scales(tmp_path):
    server = Scripted(FILES)
    async with in_front_of(tmp_path, server) as front:
        body = {"model": "base:robot-v2", "messages": [{"role": "user", "content": "a"}], "stream": False}
        async with front.request("POST", "/api/chat", body) as answer:
            assert (answer.status, answer.headers["X-LoRA"]) == (200, "robot-v2=1")
        method, target, _, data = server.received[-1]
        assert (method, target) == ("POST", "/v1/chat/completions")
        assert [entry["scale"] for entry in json.loads(data)["lora"]] == [0, 1, 0]
        async with front.request("POST", "/api/embed", {"model": "base", "input": "a"}) as answer:
            assert (answer.status, "its own scales" in (await answer.json())["error"]) == (501, True)
        async with front.request("POST", "/api/chat", {**body, "model": "llama3"}) as answer:
            assert (answer.status, await answer.json()) == (404, {"error": "model 'llama3' not found"})
        async with front.request("GET", "/api/tags") as answer:
            listed = [model["name"] for model in (await answer.json())["models"]]
        assert listed == ["base:latest", "pirate:latest", "robot-v2:latest", "pirate-2:latest"]


async def test_beside_lora_a_body_is_not_touched(tmp_path):
    server = Scripted(FILES[:1])
    raw = b' { "prompt":"\\ud800 \\u00e9","x" : 1.50, "lora": "pirate" ,"n": 1e400}\n'
    async with in_front_of(tmp_path, server) as front, front.request("POST", "/completion", raw) as answer:
        assert answer.headers["X-LoRA"] == "pirate=1"
        assert server.received[-1][3] == raw.replace(b'"lora": "pirate"', b'"lora":[{"id":0,"scale":1.0}]')


async def test_what_the_proxy_does_not_know_passes_as_it_is(tmp_path):
    server = Scripted(FILES)
    async with in_front_of(tmp_path, server) as front:
        url = "/hello?q=%20a&&b=%2F"
        async with front.request("PATCH", url, b"\xff\x00", headers={"X-Mine": "2", "Cookie": "c=1"}) as answer:
            assert (answer.status, await answer.read()) == (418, b"\x00hi\n")
            assert (answer.headers["X-Own"], answer.headers["Content-Type"]) == ("1", "a/b")
            assert "X-LoRA" not in answer.headers
        method, target, headers, data = server.received[-1]
        assert (method, target, data) == ("PATCH", url, b"\xff\x00")
        assert (headers["X-Mine"], headers["Cookie"]) == ("2", "c=1")
        async with front.request("HEAD", "/hello") as answer:
            assert (answer.status, await answer.read(), answer.headers["Content-Length"]) == (418, b"", "4")


async def test_a_compressed_body_reaches_the_server_as_what_it_says(tmp_path):
    server = Scripted(FILES[:1])
    packed, headers = gzip.compress(b'{"lora": "pirate"}'), {"Content-Encoding": "gzip"}
    async with in_front_of(tmp_path, server) as front:
        async with front.request("POST", "/completion", packed, headers=headers) as answer:
            assert answer.status == 200
        assert server.received[-1][3] == b'{"lora":[{"id":0,"scale":1.0}]}'


async def test_the_servers_key_is_the_proxys_and_the_clients_is_not_shown_to_it(tmp_path):
    server = Scripted(FILES, key="inner")
    async with in_front_of(tmp_path, server, keys=("outer",), api_key="inner") as front:
        async with front.request("POST", "/completion", {}) as answer:
            assert answer.status == 401
        async with front.request("POST", "/completion", {}, headers={"Authorization": "Bearer outer"}) as answer:
            assert answer.status == 200
        async with front.request("GET", "/hello", headers={"X-Api-Key": "outer"}) as answer:
            assert answer.status == 418
        assert all(headers["Authorization"] == "Bearer inner" for _, _, headers, _ in server.received)
        assert all("outer" not in str(headers) for _, _, headers, _ in server.received)


async def test_a_server_that_wants_a_key_ends_the_start(tmp_path):
    server = Scripted(FILES, key="inner")
    await server.start()
    try:
        with pytest.raises(StartFailed, match="--backend-api-key"):
            await look([server.url], "")
    finally:
        await server.stop()


async def test_a_server_that_breaks_off_before_its_answer_is_502_and_is_not_asked_twice(tmp_path):
    server = Scripted(FILES)
    async with in_front_of(tmp_path, server) as front:
        asked = asyncio.create_task(front.request("POST", "/completion", {"wish": "hold"}).__aenter__())
        await soon(server.arrived.acquire())
        server.break_connections()
        answer = await soon(asked)
        assert answer.status == 502
        assert "broke the connection" in (await answer.json())["error"]["message"]
        assert len(server.received) == 1


async def test_no_request_meets_a_connection_that_the_server_has_just_closed(tmp_path):
    server = Scripted(FILES)
    server.drops_idle = True
    async with in_front_of(tmp_path, server) as front:
        for _ in range(5):
            async with front.request("POST", "/completion", {"lora": "pirate"}) as answer:
                assert answer.status == 200
            async with front.request("PATCH", "/hello", b"x") as answer:
                assert answer.status == 418
        assert len(server.received) == 10


async def test_a_stream_that_breaks_off_ends_with_an_error_event(tmp_path):
    server = Scripted(FILES)
    stream = {"wish": "stream"}
    async with in_front_of(tmp_path, server) as front, front.request("POST", "/completion", stream) as answer:
        assert await soon(answer.content.readany()) == b"data: 0\n\n"
        server.go_on.release()
        assert await soon(answer.content.readany()) == b"data: 1\n\n"
        server.break_connections()
        event = await soon(answer.content.read())
        assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == 502


async def test_any_other_answer_that_breaks_off_is_cut_off(tmp_path):
    server = Scripted(FILES)
    stream = {"wish": "chunks"}
    async with in_front_of(tmp_path, server) as front, front.request("POST", "/completion", stream) as answer:
        assert await soon(answer.content.readany()) == b"data: 0\n\n"
        server.break_connections()
        with pytest.raises(aiohttp.ClientError):
            await soon(answer.content.read())


async def test_a_request_goes_to_a_server_that_has_its_adapter(tmp_path):
    one, two = Scripted(FILES[:1]), Scripted(FILES[1:])
    async with in_front_of(tmp_path, one, two) as front:
        for name, server in (("pirate", one), ("robot-v2", two)):
            async with front.request("POST", "/completion", {"lora": name}) as answer:
                assert answer.status == 200
            assert len(server.received) == 1
        async with front.request("POST", "/completion", {"lora": ["pirate", "robot-v2"]}) as answer:
            assert answer.status == 503


async def test_a_server_that_is_down_is_skipped_and_taken_again_when_it_is_back(tmp_path):
    one, two = Scripted(FILES), Scripted(FILES)
    async with in_front_of(tmp_path, one, two) as front:
        await one.stop()
        for _ in range(4):
            async with front.request("POST", "/completion", {"lora": "pirate"}) as answer:
                assert answer.status == 200
        assert len(two.received) == 4
        await one.start()
        await two.stop()

        async def served():
            async with front.request("POST", "/completion", {"lora": "pirate"}) as answer:
                return answer.status == 200

        await until(served)
        assert one.received
        await two.start()


async def test_all_servers_down_is_503_with_their_addresses_and_so_is_health(tmp_path):
    server = Scripted(FILES)
    async with in_front_of(tmp_path, server) as front:
        await server.stop()

        async def unhealthy():
            async with front.request("GET", "/health") as answer:
                return answer.status == 503

        await until(unhealthy)
        async with front.request("POST", "/completion", {}) as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"]
            assert server.url in (await answer.json())["error"]["message"]
        await server.start()


async def test_servers_that_cannot_be_reached_are_not_shown_as_ready(tmp_path):
    one, two = Scripted(FILES), Scripted(FILES)
    async with in_front_of(tmp_path, one, two) as front:

        async def shown():
            async with front.request("GET", "/workers") as answer:
                [worker] = (await answer.json())["data"]
                return worker["state"], worker["last_error"] or ""

        async def is_shown(state, *urls):
            found, error = await shown()
            return found == state and all(url in error for url in urls)

        assert await shown() == ("ready", "")
        await one.stop()
        await until(lambda: is_shown("ready", one.url))
        await two.stop()
        await until(lambda: is_shown("failed", one.url, two.url))
        await one.start()
        await two.start()
        await until(lambda: is_shown("ready"))


async def test_a_server_that_cannot_be_reached_is_given_up_soon_and_named():
    """Whether its address refuses connections or leaves them unanswered."""
    with contextlib.ExitStack() as stack:
        refusing, mute, *others = (stack.enter_context(socket.socket()) for _ in range(6))
        for server in (refusing, mute):
            server.bind(("127.0.0.1", 0))
        mute.listen(0)
        for client in others:  # they fill the backlog, so that no further connection is answered
            client.setblocking(False)
            client.connect_ex(mute.getsockname())
        urls = [f"http://127.0.0.1:{server.getsockname()[1]}" for server in (refusing, mute)]
        with pytest.raises(StartFailed) as caught:
            await soon(look(urls, ""))
        for url in urls:
            assert f"the llama-server at {url} cannot be reached: " in str(caught.value)


async def test_a_server_that_comes_back_with_other_adapters_is_asked_for_those(tmp_path):
    server = Scripted(["/l/pirate.gguf", "/l/robot.gguf"])
    async with in_front_of(tmp_path, server) as front:
        await server.stop()
        server.files = ["/l/wizard.gguf", "/l/pirate.gguf"]
        await server.start()

        async def known():
            async with front.request("POST", "/completion", {"lora": "wizard"}) as answer:
                return answer.status == 200

        await until(known)
        async with front.request("POST", "/completion", {"lora": "pirate"}) as answer:
            assert answer.status == 200
        assert json.loads(server.received[-1][3])["lora"] == [{"id": 0, "scale": 0.0}, {"id": 1, "scale": 1.0}]
        async with front.request("POST", "/completion", {"lora": "robot"}) as answer:
            assert answer.status == 400


async def test_endpoints_under_the_servers_own_scales_refuse_to_be_told_others(tmp_path):
    server = Scripted(FILES)
    async with in_front_of(tmp_path, server) as front:
        async with front.request("POST", "/v1/embeddings", {"input": "x"}) as answer:
            assert answer.status == 200
        async with front.request("POST", "/v1/embeddings", {"input": "x", "lora": "pirate"}) as answer:
            assert answer.status == 501
            assert "/v1/embeddings under its own scales" in (await answer.json())["error"]["message"]
        server.scales = [1.0, 0.0, 0.0]
        async with front.request("POST", "/lora/pirate/v1/embeddings", {"input": "x"}) as answer:
            assert (answer.status, answer.headers["X-LoRA"]) == (200, "pirate=1")


async def test_a_server_without_the_lora_field_is_given_its_scales_first(tmp_path):
    server = Scripted(FILES, per_request=False)
    async with in_front_of(tmp_path, server) as front:
        for body, scales in (({}, [0, 0, 0]), ({"lora": {"robot-v2": 0.5}}, [0, 0.5, 0]), ({}, [0, 0, 0])):
            async with front.request("POST", "/completion", body) as answer:
                assert (await answer.json())["scales"] == scales
        async with front.request("POST", "/v1/embeddings", {"input": "x", "lora": "pirate"}) as answer:
            assert (await answer.json())["scales"] == [1, 0, 0]


async def test_an_upload_or_a_path_that_the_server_has_not_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "new.gguf").write_bytes(b"GGUF")
    async with in_front_of(tmp_path, Scripted(FILES)) as front:
        body = {"path": str(tmp_path / "new.gguf")}
        async with front.request("PUT", "/adapters/new", body) as answer:
            assert answer.status == 400
            assert "start it with --lora" in (await answer.json())["error"]["message"]
        body, more = b"GGUF" * 100_000, {"headers": {"Content-Type": "application/octet-stream"}}
        async with front.request("PUT", "/adapters/new", body, **more) as answer:
            assert answer.status == 400
            assert "--backend-bin" in (await answer.json())["error"]["message"]
        assert not (tmp_path / "uploads").exists()


async def test_after_a_restart_nothing_is_asked_with_the_ids_of_before(tmp_path):
    server = Scripted(["/l/pirate.gguf", "/l/robot.gguf"])
    async with in_front_of(tmp_path, server) as front:
        for _ in range(5):
            await server.stop()
            server.files.reverse()
            await server.start()

            async def answered():
                async with front.request("POST", "/completion", {"lora": "pirate"}) as answer:
                    return answer.status == 200

            await until(answered)
            sent = {server.files[entry["id"]]: entry["scale"] for entry in json.loads(server.received[-1][3])["lora"]}
            assert sent == {"/l/pirate.gguf": 1.0, "/l/robot.gguf": 0.0}
