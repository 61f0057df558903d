"""The proxy in front of a real llama-server: at a URL, started by the proxy, and one without the ``lora`` field."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from filtered_llama_server import without_lora
from loraproxy.tools.convert import convert
from proxies import call, children, run_to_the_end, running_proxy, spawn_proxy
from servers import PeerUnavailable, Server, demo_adapters, free_port, llama_server_command, running_llama_server

CHARACTERS = tuple(demo_adapters())
SIZES = ("-np", "4", "-c", "4096", "-t", "1")
PROMPT = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
GREEDY = {"prompt": PROMPT, "temperature": 0, "n_predict": 12, "cache_prompt": False}
CHAT = {"messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def ggufs(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Path]:
    """The four characters as GGUF files, by name."""
    folder = tmp_path_factory.mktemp("ggufs")
    for name, path in demo_adapters().items():
        convert(path, folder / f"{name}.gguf", model)
    return {name: folder / f"{name}.gguf" for name in CHARACTERS}


def arguments(model: Path, ggufs: dict[str, Path]) -> list[str]:
    loras = [option for path in ggufs.values() for option in ("--lora", str(path))]
    return ["-m", str(model), *SIZES, *loras, "--lora-init-without-apply"]


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory, model: Path, ggufs: dict[str, Path]) -> Iterator[Server]:
    """A llama-server with the four characters."""
    try:
        with running_llama_server(tmp_path_factory.mktemp("direct"), arguments(model, ggufs)) as server:
            yield server
    except PeerUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory, direct: Server) -> Iterator[Server]:
    """The proxy in front of it."""
    with running_proxy(tmp_path_factory.mktemp("proxy"), at(direct.base_url)) as server:
        yield server


def at(*urls: str) -> list[str]:
    return ["serve", "--backend", "llama-server", *(f"--backend-url={url}" for url in urls)]


@contextmanager
def environment_of_llama_server() -> Iterator[list[str]]:
    """Options that start the installed llama-server as a backend; the environment has what it needs meanwhile."""
    try:
        command, needed = llama_server_command()
    except PeerUnavailable as reason:
        pytest.skip(str(reason))
    before = dict(os.environ)
    os.environ.update(needed)
    try:
        yield ["serve", "--backend", "llama-server", "--backend-bin", command[0], "--no-repack"]
    finally:
        os.environ.clear()
        os.environ.update(before)


def only(*names: str) -> list[dict[str, float]]:
    """The ``lora`` field of a llama-server for these characters, with the zeros of the others."""
    return [{"id": number, "scale": float(name in names)} for number, name in enumerate(CHARACTERS)]


def said(server: Server, **fields: Any) -> str:
    status, _, answer = call(server, "POST", "/completion", {**GREEDY, **fields})
    assert status == 200, answer
    text: str = answer["content"]
    return text


def streamed(server: Server, path: str, body: Any) -> list[Any]:
    """The events of a stream."""
    status, headers, answer = call(server, "POST", path, {**body, "stream": True})
    assert (status, headers["content-type"]) == (200, "text/event-stream"), answer
    return [json.loads(block.removeprefix("data: ")) for block in answer.split("\n\n") if block.startswith("data: {")]


def raw(server: Server, method: str, path: str, body: bytes | None = None) -> tuple[int, str, bytes]:
    """Status, reason and body as they came."""
    connection = server.connection()
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        answer = connection.getresponse()
        return answer.status, answer.reason, answer.read()
    finally:
        connection.close()


# -- at a URL --------------------------------------------------------------------------------------------------


def test_the_servers_adapters_have_names(proxy: Server, ggufs: dict[str, Path]) -> None:
    listed = call(proxy, "GET", "/lora-adapters")[2]
    assert [(item["name"], item["path"], item["scale"]) for item in listed] == [
        (name, str(path), 0.0) for name, path in ggufs.items()
    ]
    models = [model["id"] for model in call(proxy, "GET", "/v1/models")[2]["data"]]
    assert models[1:] == list(CHARACTERS)


@pytest.mark.parametrize("name", CHARACTERS[::3])
def test_a_character_asked_for_by_name_is_the_servers_own(direct: Server, proxy: Server, name: str) -> None:
    expected = said(direct, lora=only(name))
    assert said(proxy, lora=name) == expected
    assert "".join(event["content"] for event in streamed(proxy, "/completion", {**GREEDY, "lora": name})) == expected
    chat = call(direct, "POST", "/v1/chat/completions", {**CHAT, "lora": only(name)})[2]["choices"][0]["message"]
    status, headers, answer = call(proxy, "POST", f"/lora/{name}/v1/chat/completions", CHAT)
    assert (status, headers["x-lora"]) == (200, f"{name}=1")
    assert answer["choices"][0]["message"] == chat
    assert call(proxy, "POST", "/v1/chat/completions", {**CHAT, "model": name})[2]["choices"][0]["message"] == chat


def test_a_request_that_names_no_adapter_gets_the_base_model(direct: Server, proxy: Server) -> None:
    expected = said(direct, lora=only())
    assert said(proxy) == said(proxy, lora=[]) == said(proxy, lora="none") == expected
    assert said(direct) != expected, "this llama-server applies nothing by itself, so that this test shows nothing"


def test_scales_and_sets_reach_the_server(direct: Server, proxy: Server) -> None:
    both = [{"id": 1, "scale": 0.5}, {"id": 3, "scale": 0.7}]
    assert said(proxy, lora={CHARACTERS[1]: 0.5, CHARACTERS[3]: 0.7}) == said(direct, lora=both)


def test_default_scales_are_the_proxys_and_leave_the_server_alone(direct: Server, proxy: Server) -> None:
    before = call(direct, "GET", "/lora-adapters")[2]
    assert call(proxy, "POST", "/lora-adapters", [{"id": 1, "scale": 1.0}])[0] == 200
    try:
        assert said(proxy) == said(direct, lora=only(CHARACTERS[1]))
        assert call(direct, "GET", "/lora-adapters")[2] == before
    finally:
        call(proxy, "POST", "/lora-adapters", [])


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/nowhere?x=%20y", None),
        ("PUT", "/nowhere", b"{}"),
        ("POST", "/v1/embeddings", b'{"input": "hello"}'),
        ("POST", "/v1/embeddings", b"no JSON"),
        ("POST", "/rerank", b'{"query": "a", "documents": ["b"]}'),
        ("POST", "/infill", b'{"input_prefix": 3}'),
        ("POST", "/tokenize", b'{"content": "h\\u00e9llo", "with_pieces": true}'),
        ("POST", "/apply-template", b'{"messages": [{"role": "user", "content": "hi"}]}'),
        ("POST", "/slots/0?action=save", b'{"filename": "x"}'),
        ("POST", "/props", b"{}"),
        ("GET", "/props", None),
        ("POST", "/v1/chat/completions", b'{"messages": 7}'),
        ("POST", "/completion", b'{"prompt": "a", "n_predict": "many"}'),
    ],
)
def test_what_the_proxy_does_not_know_passes_byte_for_byte(
    direct: Server, proxy: Server, method: str, path: str, body: bytes | None
) -> None:
    assert raw(proxy, method, path, body) == raw(direct, method, path, body)


def test_a_long_stream_under_one_adapter_is_not_touched_by_a_request_under_another(
    direct: Server, proxy: Server
) -> None:
    long = {"n_predict": 50, "ignore_eos": True}
    alone = said(direct, lora=only(CHARACTERS[0]), **long)
    other = said(direct, lora=only(CHARACTERS[1]))
    with ThreadPoolExecutor() as threads:
        stream = threads.submit(streamed, proxy, "/completion", {**GREEDY, **long, "lora": CHARACTERS[0]})
        while not stream.done():
            assert said(proxy, lora=CHARACTERS[1]) == other
    assert "".join(event["content"] for event in stream.result()) == alone


def test_an_adapter_the_server_has_not_loaded_is_an_error_that_says_what_to_do(tmp_path: Path, direct: Server) -> None:
    server = spawn_proxy(tmp_path, [*at(direct.base_url), "--adapter=ghost=/no/ghost.gguf"])
    try:
        assert server.process.wait(60) == 1
        assert "has not loaded /no/ghost.gguf; start it with --lora" in server.last_words()
    finally:
        server.stop()


def test_a_name_may_be_given_to_what_the_server_loaded(tmp_path: Path, direct: Server, ggufs: dict[str, Path]) -> None:
    given = f"--adapter=captain={ggufs['pirate']}"
    with running_proxy(tmp_path, [*at(direct.base_url), given]) as proxy:
        assert said(proxy, lora="captain") == said(direct, lora=only("pirate"))
        names = {item["name"] for item in call(proxy, "GET", "/lora-adapters")[2]}
        assert names == {"captain", *CHARACTERS} - {"pirate"}


def test_a_server_that_is_not_there_ends_the_start_with_its_address(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    server = spawn_proxy(tmp_path, at(url))
    try:
        assert server.process.wait(60) == 1
        assert f"the llama-server at {url} cannot be reached" in server.last_words()
    finally:
        server.stop()


def test_adapters_in_another_order_after_a_restart_are_not_mixed_up(
    tmp_path: Path, model: Path, ggufs: dict[str, Path], direct: Server
) -> None:
    """Between the two servers the proxy is asked until it notices that the first is gone, and until the second is."""
    two = {name: ggufs[name] for name in CHARACTERS[:2]}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "p").mkdir()
    expected = said(direct, lora=only(CHARACTERS[0]))
    with running_llama_server(tmp_path / "a", arguments(model, two)) as first:
        proxy = spawn_proxy(tmp_path / "p", at(first.base_url))
        try:
            proxy.wait_until_healthy()
            assert said(proxy, lora=CHARACTERS[0]) == expected
            first.stop()
            while call(proxy, "POST", "/completion", {**GREEDY, "lora": CHARACTERS[0]})[0] == 200:
                pass
            reversed_order = dict(reversed(two.items()))
            with running_llama_server(tmp_path / "b", arguments(model, reversed_order), first.port):
                proxy.wait_until_healthy()
                assert said(proxy, lora=CHARACTERS[0]) == expected
        finally:
            proxy.stop()


# -- started by the proxy --------------------------------------------------------------------------------------


def test_a_server_of_its_own_has_the_characters_and_takes_more(
    tmp_path: Path, model: Path, ggufs: dict[str, Path], direct: Server
) -> None:
    three = [f"--adapter={name}={demo_adapters()[name]}" for name in CHARACTERS[:3]]
    with environment_of_llama_server() as options:
        started = [*options, "-m", str(model), *three, *SIZES, "--adapter-root", str(ggufs[CHARACTERS[3]].parent)]
        with running_proxy(tmp_path, started) as proxy:
            for name in CHARACTERS[:3]:
                assert said(proxy, lora=name) == said(direct, lora=only(name))
            assert said(proxy) == said(direct, lora=only())
            with ThreadPoolExecutor() as threads:
                long = {**GREEDY, "n_predict": 60, "ignore_eos": True, "lora": CHARACTERS[0]}
                stream = threads.submit(streamed, proxy, "/completion", long)
                path = str(ggufs[CHARACTERS[3]])
                assert call(proxy, "PUT", f"/adapters/{CHARACTERS[3]}", {"path": path})[0] == 201
                assert said(proxy, lora=CHARACTERS[3]) == said(direct, lora=only(CHARACTERS[3]))
                assert stream.result()[-1]["tokens_predicted"] == 60
            while len(children(proxy.process)) > 1:  # the old one ends when its last request has
                pass
            left = children(proxy.process)
    assert proxy.process.returncode == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in left)
    assert not list(tmp_path.glob("loraproxy-*"))


def test_a_server_of_its_own_that_is_killed_is_replaced_and_none_outlives_a_killed_proxy(
    tmp_path: Path, model: Path
) -> None:
    with environment_of_llama_server() as options:
        proxy = spawn_proxy(tmp_path, [*options, "-m", str(model), *SIZES])
        try:
            proxy.wait_until_healthy()
            (first,) = children(proxy.process)
            os.kill(first, signal.SIGKILL)
            while proxy.is_healthy():
                pass
            proxy.wait_until_healthy()
            (second,) = children(proxy.process)
            assert second != first
            assert said(proxy)
            proxy.process.kill()
            if sys.platform == "linux":
                while Path(f"/proc/{second}").exists() and "Z" not in Path(f"/proc/{second}/stat").read_text():
                    pass
        finally:
            proxy.stop()


def test_a_server_that_does_not_start_says_why(model: Path) -> None:
    with environment_of_llama_server() as options:
        ended = run_to_the_end(*options, "-m", str(model), "--port", "0", "--", "--no-such-option")
    assert ended.returncode == 1
    assert "the llama-server ended while it was starting" in ended.stderr
    assert "--no-such-option" in ended.stderr


# -- one set at a time -----------------------------------------------------------------------------------------


async def test_a_server_without_the_lora_field_is_drained_before_its_scales_change(
    tmp_path: Path, direct: Server
) -> None:
    one, other = CHARACTERS[0], CHARACTERS[1]
    long = {"n_predict": 60, "ignore_eos": True}
    alone = await asyncio.to_thread(said, direct, lora=only(one), **long)
    expected = await asyncio.to_thread(said, direct, lora=only(other))
    async with without_lora(direct) as old:
        proxy = await asyncio.to_thread(spawn_proxy, tmp_path, at(old.url))
        try:
            await asyncio.to_thread(proxy.wait_until_healthy)
            stream = asyncio.create_task(
                asyncio.to_thread(streamed, proxy, "/completion", {**GREEDY, **long, "lora": one})
            )
            await old.changed.wait()
            answers = await asyncio.gather(*(asyncio.to_thread(said, proxy, lora=other) for _ in range(2)))
            assert answers == [expected, expected]
            assert "".join(event["content"] for event in await stream) == alone
            assert await asyncio.to_thread(said, proxy) == await asyncio.to_thread(said, direct, lora=only())
        finally:
            await asyncio.to_thread(proxy.stop)
    assert old.changes == [only(one), only(other), only()]
    log = [line.partition("event=")[2].split()[0] for line in proxy.log.read_text().splitlines() if "event=" in line]
    events = [event for event in log if event in ("draining", "changed")]
    assert sorted(events) == ["changed", "changed", "changed", "draining"]
    assert events[:2].count("draining") == 1, "the second change has to wait for the drain"
