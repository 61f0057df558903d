"""Keys, CORS, ids, errors and the endpoints that the proxy answers itself."""

import asyncio
import gzip
import json
import logging

import pytest
from standin import running, soon

from loraproxy.config import CorsConfig, HttpConfig
from loraproxy.errors import InvalidRequest
from loraproxy.proxy.body import parse_json


async def error_of(answer):
    body = await answer.json()
    assert body.keys() == {"error"}
    assert body["error"]["code"] == answer.status
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
    return answer.status, body["error"]["type"], body["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [{"Authorization": "Bearer two"}, {"X-Api-Key": "two"}, {"Authorization": "one"}],
    ids=lambda headers: str(headers),
)
async def test_any_of_the_keys_opens_the_api(tmp_path, headers):
    async with running(tmp_path, keys=("one", "two")) as bench, bench.get("/props", headers=headers) as answer:
        assert answer.status == 200


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer three"}, {"Authorization": "Bearer "}, {"X-Api-Key": "öne"}],
    ids=lambda headers: str(headers),
)
@pytest.mark.parametrize("path", ["/props", "/v1/models", "/metrics", "/lora/pirate/v1/models"])
async def test_without_a_right_key_the_answer_is_401(tmp_path, headers, path):
    async with running(tmp_path, keys=("one", "two")) as bench, bench.get(path, headers=headers) as answer:
        assert await error_of(answer) == (401, "authentication_error", "Invalid API Key")


async def test_health_needs_no_key(tmp_path):
    async with running(tmp_path, keys=("one",)) as bench:
        for path in ("/health", "/v1/health"):
            async with bench.get(path) as answer:
                assert (answer.status, await answer.json()) == (200, {"status": "ok"})


async def test_a_preflight_needs_no_key_and_says_what_is_allowed(tmp_path):
    async with (
        running(tmp_path, keys=("one",)) as bench,
        bench.client.options(bench.url + "/v1/chat/completions", headers={"Origin": "https://a.example"}) as answer,
    ):
        assert answer.status == 200
        assert answer.headers["Access-Control-Allow-Origin"] == "https://a.example"
        assert answer.headers["Access-Control-Allow-Methods"] == "GET, POST, DELETE, OPTIONS"
        assert answer.headers["Access-Control-Allow-Headers"] == "*"
        assert answer.headers["Access-Control-Allow-Credentials"] == "true"


@pytest.mark.parametrize(
    ("origins", "credentials", "origin", "allowed"),
    [
        ("*", True, "https://a.example", "https://a.example"),
        ("*", False, "https://a.example", "*"),
        ("localhost", True, "http://localhost:3000", "http://localhost:3000"),
        ("localhost", True, "http://[::1]:3000", "http://[::1]:3000"),
        ("localhost", True, "https://localhost.example", None),
        ("localhost", True, "http://[", None),
        ("https://b.example", True, "https://a.example", "https://b.example"),
    ],
)
async def test_the_allowed_origin_is_llama_servers(tmp_path, origins, credentials, origin, allowed):
    http = HttpConfig(cors=CorsConfig(origins=origins, credentials=credentials))
    async with running(tmp_path, http) as bench, bench.get("/nowhere", headers={"Origin": origin}) as answer:
        assert answer.headers.get("Access-Control-Allow-Origin") == allowed


async def test_a_request_id_is_kept_where_it_is_sane_and_made_where_not(tmp_path):
    async with running(tmp_path) as bench:
        async with bench.get("/health", headers={"X-Request-Id": "abc-1"}) as answer:
            assert answer.headers["X-Request-Id"] == "abc-1"
        ids = set()
        for given in ("", "x" * 129, "a b"):
            async with bench.post("/completion", b"{", headers={"X-Request-Id": given}) as answer:
                ids.add(answer.headers["X-Request-Id"])
        assert len(ids) == 3
        assert all(len(made) == 32 for made in ids)


@pytest.mark.parametrize(("method", "path"), [("GET", "/nowhere"), ("GET", "/completion"), ("PUT", "/health")])
async def test_an_unknown_path_or_method_is_llama_servers_404(tmp_path, method, path):
    async with running(tmp_path) as bench, bench.client.request(method, bench.url + path) as answer:
        assert await error_of(answer) == (404, "not_found_error", "File Not Found")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/embeddings"),
        ("POST", "/infill"),
        ("POST", "/slots/0"),
        ("POST", "/v1/responses"),
        ("POST", "/props"),
    ],
)
async def test_what_llama_server_has_and_this_server_has_not_is_501(tmp_path, method, path):
    async with running(tmp_path) as bench, bench.client.request(method, bench.url + path) as answer:
        status, kind, message = await error_of(answer)
        assert (status, kind) == (501, "not_supported_error")
        assert message.endswith("is not supported by this server")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the request body is empty; it must be JSON"),
        (b'{"prompt": "x"', "the request body is not JSON: Expecting ',' delimiter at line 1 column 15"),
        (b"[]", "the request body must be a JSON object, not an array"),
        (b"null", "the request body must be a JSON object, not null"),
        (b'"x"', "the request body must be a JSON object, not a string"),
        (b"7", "the request body must be a JSON object, not a number"),
        (b'{"prompt": "\xff"}', "the request body is not UTF-8: invalid start byte at byte 12"),
        (b"[" * 200_000, "the request body is nested too deeply"),
        (b'{"lora": [{"id": 0, "scale": NaN}]}', "the request body is not JSON: NaN is not a JSON number"),
        (b'{"lora": "pirate", "x": 1e999}', "the request body has a number that is out of range"),
        (b'{"lora": "pirate", "x": "\\ud800"}', "a string in the request body has a lone surrogate"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "the request body is not JSON this server can read: "),
    ],
)
async def test_a_body_that_is_no_json_object_is_400_and_says_why(tmp_path, body, message):
    async with running(tmp_path) as bench, bench.post("/completion", body) as answer:
        status, kind, shown = await error_of(answer)
        assert (status, kind) == (400, "invalid_request_error")
        assert shown.startswith(message)
        assert not bench.worker.received


def test_a_byte_order_mark_is_skipped():
    assert parse_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


def test_utf_16_is_refused():
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        parse_json('{"a": 1}'.encode("utf-16"))


async def test_a_body_over_the_limit_is_413_whether_its_length_is_announced_or_not(tmp_path):
    async def chunks():
        for _ in range(4):
            yield b"x" * 1000

    async with running(tmp_path, HttpConfig(max_body=2000)) as bench:
        squeezed = gzip.compress(b" " * 1_000_000)
        for data, headers in ((b"x" * 4000, {}), (chunks(), {}), (squeezed, {"Content-Encoding": "gzip"})):
            async with bench.client.post(bench.url + "/completion", data=data, headers=headers) as answer:
                assert await error_of(answer) == (
                    413,
                    "invalid_request_error",
                    "the request body is larger than 2000 bytes (http.max_body)",
                )


@pytest.mark.parametrize("path", ["/completion", "/tokenize", "/lora-adapters"])
async def test_a_body_that_is_not_what_its_encoding_says_is_400_and_no_error_of_ours(tmp_path, path, caplog):
    async with (
        running(tmp_path) as bench,
        bench.post(path, b"not gzip", headers={"Content-Encoding": "gzip"}) as answer,
    ):
        assert await error_of(answer) == (
            400,
            "invalid_request_error",
            "the request body cannot be read: Can not decode content-encoding: gzip",
        )
        assert answer.headers["Connection"] == "close"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/props", "/lora-adapters", "/lora/pirate/health"])
async def test_head_is_answered_as_get_without_a_body(tmp_path, path):
    async with running(tmp_path) as bench, bench.client.head(bench.url + path) as answer:
        assert (answer.status, await answer.read()) == (200, b"")


@pytest.mark.parametrize(
    "message",
    [
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
        b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n{}",
        b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /completion HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"FOO /health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 100,
    ],
    ids=lambda message: repr(message[:30]),
)
async def test_broken_http_is_400_and_leaves_no_error_in_the_log(tmp_path, message, caplog):
    async with running(tmp_path) as bench:
        host, port = bench.runner.addresses[0]
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(message)
        answer = await soon(reader.read())
        writer.close()
        await writer.wait_closed()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.split()[1] == b"400"
        assert b"Content-Type: application/json" in head
        error = json.loads(body)["error"]
        assert (error["code"], error["type"]) == (400, "invalid_request_error")
        assert 20 < len(error["message"]) < 400
        assert "\n" not in error["message"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "headers", [{"Origin": b"http://\xff"}, {"X-Request-Id": b"\xff\xfe"}, {"Authorization": b"Bearer \xff"}]
)
async def test_headers_that_are_no_text_do_no_harm(tmp_path, headers):
    async with running(tmp_path) as bench:
        host, port = bench.runner.addresses[0]
        reader, writer = await asyncio.open_connection(host, port)
        (name, value), *_ = headers.items()
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n" + name.encode() + b": " + value + b"\r\n\r\n")
        assert (await soon(reader.readline())).split()[1] == b"200"
        writer.close()
        await writer.wait_closed()


async def test_the_content_type_of_a_request_does_not_matter(tmp_path):
    async with running(tmp_path) as bench:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "nonsense"):
            async with bench.post("/completion", {}, headers={"Content-Type": kind}) as answer:
                assert answer.status == 200


async def test_an_unknown_adapter_in_the_url_is_an_error_everywhere(tmp_path):
    async with running(tmp_path) as bench:
        for path in ("/lora/pirat/health", "/lora/pirat/v1/models", "/lora/pirat/props", "/lora/pi%2Frate/props"):
            async with bench.get(path) as answer:
                status, _, message = await error_of(answer)
                assert status == 400
                assert message.endswith("did you mean 'pirate'? known adapters: pirate, robot")


async def test_the_model_list_has_the_base_and_every_adapter(tmp_path):
    async with running(tmp_path) as bench, bench.get("/v1/models") as answer:
        listing = await answer.json()
        assert [entry["id"] for entry in listing["data"]] == ["base", "pirate", "robot"]
        assert listing["data"][1] == {
            **listing["data"][0],
            "id": "pirate",
            "aliases": ["base:pirate"],
            "parent": "base",
        }
        assert [entry["name"] for entry in listing["models"]] == ["base", "pirate", "robot"]


async def test_default_scales_apply_to_requests_that_select_nothing(tmp_path):
    async with running(tmp_path) as bench:
        for entries, label in (
            ([{"id": 1, "scale": 0.5}], "robot=0.5"),
            ([{"name": "pirate"}], "pirate=1"),
            ([], ""),
        ):
            async with bench.post("/lora-adapters", entries) as answer:
                assert (answer.status, await answer.json()) == (200, {"success": True})
            async with bench.post("/completion", {}) as answer:
                assert answer.headers["X-LoRA"] == label
        async with bench.get("/lora-adapters") as answer:
            assert await answer.json() == [
                {
                    "id": number,
                    "name": name,
                    "path": str(tmp_path / name),
                    "scale": 0.0,
                    "task_name": "",
                    "prompt_prefix": "",
                }
                for number, name in enumerate(("pirate", "robot"))
            ]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"id": 0}, "Request body must be an array"),
        ([{"id": 7, "scale": 1}], "unknown adapter id 7"),
        ([{"id": 0, "scale": "1"}], "lora[0].scale must be a number, not a string"),
    ],
)
async def test_wrong_default_scales_are_refused_and_change_nothing(tmp_path, entries, message):
    async with running(tmp_path) as bench:
        async with bench.post("/lora-adapters", entries) as answer:
            status, _, shown = await error_of(answer)
            assert status == 400
            assert shown.startswith(message)
        async with bench.get("/lora-adapters") as answer:
            assert [entry["scale"] for entry in await answer.json()] == [0.0, 0.0]


async def test_metrics_are_the_workers_and_the_proxys(tmp_path):
    async with running(tmp_path) as bench:
        for body in ({"lora": "pirate"}, {}, {"lora": {"pirate": 1, "robot": 1}}, {"lora": "nobody"}):
            async with bench.post("/completion", body) as answer:
                await answer.read()
        async with bench.get("/metrics") as answer:
            text = await answer.text()
        assert "llamacpp:n_decode_total 1\n" in text
        for adapter in ("pirate", "base", "(several)"):
            assert f'loraproxy_requests_total{{adapter="{adapter}",endpoint="/completion",outcome="ok"}} 1.0' in text
        assert 'outcome="refused"' in text
        assert "loraproxy_requests_in_flight 0.0" in text


async def test_strict_models_refuses_an_unknown_model(tmp_path):
    async with running(tmp_path, strict=True) as bench:
        async with bench.post("/v1/completions", {"model": "gpt-4"}) as answer:
            status, _, message = await error_of(answer)
            assert status == 400
            assert message.startswith("unknown model 'gpt-4'; the base model is base")
        async with bench.post("/v1/completions", {"model": "base"}) as answer:
            assert answer.status == 200
