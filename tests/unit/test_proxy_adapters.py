"""Adapters that come, change and go through the API, in front of a stand-in for the worker."""

import asyncio
import json
import os
import re

import aiohttp
import pytest
import pytest_asyncio
from standin import running, soon

from loraproxy.adapters.registry import Source
from loraproxy.adapters.uploads import About, UploadFolder

OCTETS = {"Content-Type": "application/octet-stream"}
PEFT = ("adapter_config.json", "adapter_model.safetensors")


@pytest_asyncio.fixture
async def bench(tmp_path):
    (tmp_path / "root").mkdir()
    async with running(tmp_path) as bench:
        yield bench


async def ask(bench, method, path, body=None, **more):
    """Status and JSON (or text) of one request."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    async with bench.client.request(method, bench.url + path, data=data, **more) as answer:
        text = await answer.text()
        return answer.status, json.loads(text) if text.startswith("{") else text


async def put(bench, name, body, status=201, **more):
    headers = {"Content-Type": "application/json"}
    found, answer = await ask(bench, "PUT", f"/adapters/{name}", body, headers=headers, **more)
    assert found == status, answer
    return answer if status < 300 else answer["error"]["message"]


async def upload(bench, name, content, status=201, query=""):
    found, answer = await ask(bench, "PUT", f"/adapters/{name}{query}", content, headers=OCTETS)
    assert found == status, answer
    return answer if status < 300 else answer["error"]["message"]


async def wire_of(bench, lora):
    """What the worker was asked for by a request."""
    status, answer = await ask(bench, "POST", "/completion", {"lora": lora})
    assert status == 200, answer
    return [entry["id"] for entry in json.loads(answer["body"])["lora"]]


def uploaded(tmp_path):
    return sorted(str(path.relative_to(tmp_path / "uploads")) for path in (tmp_path / "uploads").rglob("*"))


async def until(condition):
    async def poll():
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    await soon(poll())


# -- by path


async def test_a_path_in_an_allowed_folder_is_registered_and_replaced_in_place(bench, tmp_path):
    file = tmp_path / "root" / "one.gguf"
    file.write_text("v1")
    made = await put(bench, "one", {"path": str(file), "scale": 0.5, "description": "the first"})
    assert (made["id"], made["digest"], made["scale"], made["description"]) == (2, "v1", 0.5, "the first")
    assert (made["source"], made["state"], made["leases"], made["last_used"]) == ("api", "registered", 0, None)
    before = await wire_of(bench, "one")
    file.write_text("v2")
    replaced = await put(bench, "one", {"path": "one.gguf"}, status=200)
    assert (replaced["id"], replaced["digest"], replaced["scale"]) == (2, "v2", 0.5)
    assert await wire_of(bench, "one") != before
    assert (await ask(bench, "GET", "/adapters/one"))[1]["state"] == "resident"
    listed = (await ask(bench, "GET", "/adapters"))[1]
    assert [adapter["name"] for adapter in listed["data"]] == ["pirate", "robot", "one"]
    async with bench.get("/lora-adapters") as answer:
        assert (await answer.json())[2]["scale"] == 0.5


@pytest.mark.parametrize("inside", [False, True])
async def test_a_path_out_of_the_allowed_folders_is_refused_whether_there_is_something_or_not(bench, tmp_path, inside):
    secret = tmp_path / "secret.gguf"
    if inside:
        secret.write_text("v1")
    (tmp_path / "root" / "link.gguf").symlink_to(secret)
    (tmp_path / "root" / "folder").mkdir()
    for name in PEFT:
        (tmp_path / "root" / "folder" / name).symlink_to(secret)
    (tmp_path / "rootling").mkdir()
    for path in (secret, "link.gguf", tmp_path / "root" / "link.gguf", "folder", tmp_path / "rootling", "/etc/passwd"):
        message = await put(bench, "x", {"path": str(path)}, status=400)
        assert "is in none of the allowed folders" in message
    assert "must not contain '..'" in await put(bench, "x", {"path": "../secret.gguf"}, status=400)
    for path in ("a\0b", "\ud800.gguf"):
        assert "is no path" in await put(bench, "x", {"path": path}, status=400)
    assert "there is nothing at 'nothing.gguf'" in await put(bench, "x", {"path": "nothing.gguf"}, status=404)
    assert "x" not in bench.registry


async def test_a_link_that_stays_inside_is_followed(bench, tmp_path):
    (tmp_path / "root" / "real.gguf").write_text("v1")
    (tmp_path / "root" / "link.gguf").symlink_to("real.gguf")
    assert (await put(bench, "x", {"path": "link.gguf"}))["path"] == str(tmp_path / "root" / "real.gguf")


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ({}, '"path" is required'),
        ({"path": 3}, '"path" must be a string, not a number'),
        ({"path": "a.gguf", "scale": "1"}, '"scale" must be a number, not a string'),
        ({"path": "a.gguf", "scale": 1e999}, '"scale" must be a finite number'),
        ({"path": "a.gguf", "scale": 1e300}, "the scale of 'x' must be a finite number"),
        ({"path": "a.gguf", "description": {}}, '"description" must be a string'),
        ({"path": "a.gguf", "sclae": 1}, "unknown field 'sclae'; known are description, path, scale"),
        ({"path": "bad.gguf"}, "bad: this file"),
    ],
)
async def test_a_registration_with_a_fault_says_which_and_changes_nothing(bench, tmp_path, body, fault):
    (tmp_path / "root" / "a.gguf").write_text("v1")
    (tmp_path / "root" / "bad.gguf").write_text("bad: this file")
    raw = json.dumps(body).replace("Infinity", "1e999").encode()
    assert fault in await put(bench, "x", raw, status=400)
    assert "x" not in bench.registry


@pytest.mark.parametrize("name", ["none", "BASE", ".x", "a%20b", "a%3Ab"])
async def test_a_name_that_no_adapter_may_bear_is_refused(bench, name):
    assert "cannot name an adapter" in await put(bench, name, {"path": "a"}, status=400)


# -- uploads


async def test_an_upload_is_kept_and_found_again(bench, tmp_path):
    made = await upload(bench, "up", b"v1", query="?scale=0.25&description=mine")
    assert (made["source"], made["digest"], made["scale"], made["description"]) == ("upload", "v1", 0.25, "mine")
    assert uploaded(tmp_path) == ["up", "up/v1", "up/v1/about.json", "up/v1/adapter.gguf"]
    assert (tmp_path / "uploads").stat().st_mode & 0o777 == 0o700
    assert await wire_of(bench, "up")
    (stored,) = UploadFolder(tmp_path / "uploads").stored()
    assert str(stored.path) == made["path"]
    assert (stored.about.name, stored.about.scale, stored.about.description) == ("up", 0.25, "mine")


async def test_a_replaced_upload_is_removed_when_its_last_request_ends(bench, tmp_path):
    await upload(bench, "up", b"v1")
    request = asyncio.create_task(ask(bench, "POST", "/completion", {"lora": "up", "wish": "hold"}))
    await soon(bench.worker.arrived.acquire())
    await upload(bench, "up", b"v2", status=200)
    assert "up/v1" in uploaded(tmp_path), "a request runs under it"
    assert len(bench.worker.loaded) == 1
    bench.worker.go_on.release()
    await soon(request)
    await until(lambda: "up/v1" not in uploaded(tmp_path))
    assert "up/v2" in uploaded(tmp_path)
    assert bench.worker.loaded == []


async def test_a_scale_that_is_refused_leaves_what_was_uploaded_before(bench, tmp_path):
    await upload(bench, "up", b"v1", query="?scale=2")
    for content in (b"v1", b"v2"):  # finite, but not in float32
        assert "must be a finite number" in await upload(bench, "up", content, status=400, query="?scale=1e39")
    assert uploaded(tmp_path) == ["up", "up/v1", "up/v1/about.json", "up/v1/adapter.gguf"]
    assert UploadFolder(tmp_path / "uploads").stored()[0].about.scale == 2


async def test_uploading_the_same_again_changes_what_goes_with_it_and_nothing_else(bench, tmp_path):
    await upload(bench, "up", b"v1")
    before = await wire_of(bench, "up")
    again = await upload(bench, "up", b"v1", status=200, query="?scale=2")
    assert again["scale"] == 2
    assert await wire_of(bench, "up") == before
    assert UploadFolder(tmp_path / "uploads").stored()[0].about.scale == 2


async def test_what_was_replaced_and_uploaded_again_meanwhile_is_kept(bench, tmp_path):
    await upload(bench, "up", b"v1")
    request = asyncio.create_task(ask(bench, "POST", "/completion", {"lora": "up", "wish": "hold"}))
    await soon(bench.worker.arrived.acquire())
    await upload(bench, "up", b"v2", status=200)
    await upload(bench, "up", b"v1", status=200)
    bench.worker.go_on.release()
    await soon(request)
    await until(lambda: "up/v2" not in uploaded(tmp_path))
    assert await wire_of(bench, "up")
    assert "up/v1/adapter.gguf" in uploaded(tmp_path)


async def test_a_peft_folder_is_uploaded_as_a_form(bench, tmp_path):
    form = aiohttp.FormData()
    for name in PEFT:
        form.add_field(name, b"v1", filename=name)
    form.add_field("description", "a form")
    status, made = await ask(bench, "PUT", "/adapters/up", form)
    assert (status, made["description"]) == (201, "a form")
    assert uploaded(tmp_path)[2:] == ["up/v1/about.json", *(f"up/v1/{name}" for name in PEFT)]


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        (["adapter_config.json"], "the form has adapter_config.json; send a GGUF file"),
        (["one.gguf", "two.gguf"], "the form has adapter.gguf twice"),
        (["evil.py"], "the form has a file 'evil.py'"),
        (["../../../evil.bin"], "the form has a file"),
        ([], "the form has no files"),
    ],
)
async def test_a_form_that_is_no_adapter_is_refused_and_leaves_nothing(bench, tmp_path, files, fault):
    form = aiohttp.FormData({"scale": "1"}, default_to_multipart=True)
    for name in files:
        form.add_field("file", b"v1", filename=name)
    status, answer = await ask(bench, "PUT", "/adapters/up", form)
    assert status == 400
    assert fault in answer["error"]["message"]
    assert uploaded(tmp_path) == []


async def test_an_upload_that_is_too_large_bad_empty_or_broken_leaves_nothing(bench, tmp_path):
    assert "larger than 10000 bytes" in await upload(bench, "up", b"x" * 10_001, status=413)

    async def endless():
        while True:
            yield b"x" * 1000

    assert "larger than 10000 bytes" in await upload(bench, "up", endless(), status=413)
    assert "bad: the uploaded file" not in await upload(bench, "up", b"bad: nothing", status=400)
    assert "the upload is empty" in await upload(bench, "up", b"", status=400)
    assert "must be a number" in await upload(bench, "up", b"v1", status=400, query="?scale=loud")
    assert "must be a finite number" in await upload(bench, "up", b"v1", status=400, query="?scale=1e39")
    short = {"Content-Type": "application/x-www-form-urlencoded"}  # curl --data-binary
    status, answer = await ask(bench, "PUT", "/adapters/up", b"some log", headers=short)
    assert status == 400
    assert "is not JSON" in answer["error"]["message"]
    assert "nor is it a GGUF file" in answer["error"]["message"]
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    status, answer = await ask(bench, "PUT", "/adapters/up", b"--y\r\nnonsense", headers=headers)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert uploaded(tmp_path) == []
    assert "up" not in bench.registry


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}, b"no gzip"),
        ({"Content-Type": "multipart/form-data; boundary=x", "Content-Encoding": "deflate"}, b"\xff" * 20),
        (
            {"Content-Type": "multipart/form-data; boundary=x"},
            b"--x\r\nA: " + b"a" * 200_000 + b"\r\n\r\n1\r\n--x--\r\n",
        ),
        ({"Content-Type": "multipart/form-data; boundary=x"}, b"--x\r\n" + b"A: 1\r\n" * 5000 + b"\r\n1\r\n--x--\r\n"),
        ({"Content-Type": "multipart/form-data; boundary=x"}, b"--x\r\nno header\r\n\r\n1\r\n--x--\r\n"),
        (
            {"Content-Type": "multipart/form-data; boundary=x"},
            b"--x\r\nContent-Disposition: form-data; name=_charset_\r\n\r\n" + b"u" * 40 + b"\r\n--x--\r\n",
        ),
    ],
    ids=["gzip", "form-deflate", "long-header", "many-headers", "no-header", "charset"],
)
async def test_an_upload_that_is_broken_as_a_message_says_so_and_leaves_nothing(bench, tmp_path, headers, body):
    status, answer = await ask(bench, "PUT", "/adapters/up", body, headers=headers)
    assert status == 400
    assert "cannot be read: " in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 300
    assert uploaded(tmp_path) == []


async def test_what_stands_before_a_forms_first_part_is_bounded(bench, tmp_path):
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    status, answer = await ask(bench, "PUT", "/adapters/up", b"z\n" * 200_000, headers=headers)
    assert (status, "bytes outside of its files" in answer["error"]["message"]) == (400, True)
    assert uploaded(tmp_path) == []


async def test_a_client_that_goes_away_in_the_middle_of_an_upload_leaves_nothing(bench, tmp_path):
    async def half():
        yield b"x" * 1000
        await until(lambda: any(name.startswith(".incoming") for name in uploaded(tmp_path)))
        raise ConnectionResetError

    with pytest.raises((aiohttp.ClientError, ConnectionResetError)):
        await upload(bench, "up", half())
    await until(lambda: uploaded(tmp_path) == [])


class Slow:
    """An upload whose second half comes when it is told to."""

    def __init__(self, bench, tmp_path, name):
        self.go_on = asyncio.Event()
        self._has_begun = lambda: any(entry.startswith(".incoming") for entry in uploaded(tmp_path))
        self._task = asyncio.create_task(ask(bench, "PUT", f"/adapters/{name}", self._halves(), headers=OCTETS))

    async def _halves(self):
        yield b"first half, "
        await self.go_on.wait()
        yield b"second half"

    async def begun(self):
        await until(self._has_begun)

    async def answer(self):
        return await soon(self._task)


async def test_when_the_server_ends_uploads_under_way_finish_and_no_more_are_taken(bench, tmp_path):
    slow = Slow(bench, tmp_path, "slow")
    await slow.begun()
    drain = asyncio.create_task(bench.admin.changes.drain(10))
    await asyncio.sleep(0)
    message = await upload(bench, "late", b"x", status=503)
    assert message == "the server is shutting down; nothing was changed"
    slow.go_on.set()
    status, answer = await slow.answer()
    assert (status, answer["digest"]) == (201, "first half, second half")
    assert await soon(drain) is True


async def test_an_upload_that_takes_longer_than_the_server_can_wait_is_told_so_and_leaves_nothing(bench, tmp_path):
    slow = Slow(bench, tmp_path, "slow")
    await slow.begun()
    assert await soon(bench.admin.changes.drain(0)) is False
    await soon(bench.admin.changes.close())
    assert uploaded(tmp_path) == []
    status, answer = await slow.answer()
    assert (status, answer["error"]["type"]) == (503, "unavailable_error")
    assert answer["error"]["message"] == "the server is shutting down; this took too long and was given up"
    assert "slow" not in bench.registry


@pytest.mark.parametrize(
    ("request_line", "kind"),
    [
        ("PUT /adapters/up", "application/octet-stream"),
        ("PUT /adapters/up", "multipart/form-data; boundary=x"),
        ("PUT /adapters/up", "application/json"),
        ("POST /completion", "application/json"),
    ],
)
async def test_a_body_that_stops_coming_is_408_and_leaves_nothing(bench, tmp_path, monkeypatch, request_line, kind):
    monkeypatch.setattr("loraproxy.proxy.body.STALLED_SECONDS", 0.05)
    reader, writer = await asyncio.open_connection(*bench.runner.addresses[0])
    head = f"{request_line} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: 9000\r\n\r\n"
    writer.write(head.encode() + b'--x\r\nContent-Disposition: form-data; name="f"; filename="a.gguf"\r\n\r\nGGUF')
    try:
        answer = await soon(reader.readuntil(b"\r\n\r\n"))
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"Connection: close" in answer
        length = re.search(rb"Content-Length: (\d+)", answer)
        error = json.loads(await soon(reader.readexactly(int(length[1]))))["error"]
        assert (error["code"], error["type"]) == (408, "invalid_request_error")
        assert "nothing of the request body came for 0.05 s; " in error["message"]
        assert uploaded(tmp_path) == []
    finally:
        writer.close()
        await writer.wait_closed()


def test_what_a_server_left_unfinished_or_replaced_is_cleared_up_at_the_next_start(tmp_path):
    folder = UploadFolder(tmp_path / "uploads")
    folder.begin()
    for digest in ("old", "new"):
        incoming = folder.begin()
        (incoming / "adapter.gguf").write_text(digest)
        path = folder.keep(incoming, About("up"), digest)
    gone = folder.begin()
    (gone / "adapter.gguf").write_text("gone")
    folder.forget(folder.keep(gone, About("gone"), "gone"))
    os.utime(path.parent.parent / "old" / "about.json", (1, 1))
    (tmp_path / "uploads" / "odd" / "x").mkdir(parents=True)
    assert [stored.path for stored in folder.stored()] == [path]
    assert uploaded(tmp_path) == ["odd", "odd/x", "up", "up/new", "up/new/about.json", "up/new/adapter.gguf"]


# -- removing


async def test_a_removed_adapter_is_unknown_at_once_and_requests_in_flight_finish(bench, tmp_path):
    await upload(bench, "up", b"v1")
    request = asyncio.create_task(ask(bench, "POST", "/completion", {"lora": "up", "wish": "hold"}))
    await soon(bench.worker.arrived.acquire())
    status, answer = await ask(bench, "DELETE", "/adapters/up")
    assert (status, answer) == (200, {"name": "up", "id": 2, "deleted": True})
    status, answer = await ask(bench, "POST", "/completion", {"lora": "up"})
    assert status == 400
    assert "unknown adapter 'up'" in answer["error"]["message"]
    for method in ("GET", "DELETE"):
        assert (await ask(bench, method, "/adapters/up"))[0] == 404
    assert "up/v1/adapter.gguf" in uploaded(tmp_path), "its request may still need it"
    assert "up/v1/about.json" not in uploaded(tmp_path), "after a crash it would not come back"
    bench.worker.go_on.release()
    assert (await soon(request))[0] == 200
    await until(lambda: uploaded(tmp_path) == [])
    assert bench.worker.loaded == []


async def test_what_is_in_the_watched_folder_is_not_removed_by_the_api(bench, tmp_path):
    (tmp_path / "w.gguf").write_text("v1")
    await bench.catalog.register("w", tmp_path / "w.gguf", Source.FOLDER)
    status, answer = await ask(bench, "DELETE", "/adapters/w")
    assert status == 409
    assert f"remove {tmp_path / 'w.gguf'} there instead" in answer["error"]["message"]


# -- vLLM's endpoints


async def test_vllms_endpoints_load_and_unload_in_its_words(bench, tmp_path):
    (tmp_path / "root" / "a.gguf").write_text("v1")

    async def call(what, **body):
        return await ask(bench, "POST", f"/v1/{what}_lora_adapter", body)

    assert await call("load", lora_name="a", lora_path="a.gguf") == (
        200,
        "Success: LoRA adapter 'a' added successfully.",
    )
    status, answer = await call("load", lora_name="a", lora_path="a.gguf")
    assert status == 400
    assert answer["error"]["message"].startswith("The lora adapter 'a' has already been loaded.")
    assert (await call("load", lora_name="a", lora_path="a.gguf", load_inplace=True))[0] == 200
    assert await wire_of(bench, "a")
    assert await call("unload", lora_name="a", lora_int_id=3) == (
        200,
        "Success: LoRA adapter 'a' removed successfully.",
    )
    status, answer = await call("unload", lora_name="a")
    assert (status, answer["error"]["message"]) == (404, "The lora adapter 'a' cannot be found.")
    for what, body in (("load", {"lora_name": "a"}), ("load", {"lora_path": "a"}), ("unload", {})):
        assert (await call(what, **body))[0] == 400
    assert (await call("load", lora_name="a", lora_path="nothing"))[0] == 404
    assert (await call("load", lora_name="a", lora_path=str(tmp_path)))[0] == 400
    assert (await call("load", lora_name=3, lora_path="a.gguf"))[0] == 400
    assert (await call("load", lora_name="a", lora_path="a.gguf", load_inplace="yes"))[0] == 400


# -- versions and loading


async def test_a_file_that_changed_unnoticed_is_surveyed_again_and_the_request_runs_under_what_is_there(
    bench, tmp_path
):
    file = tmp_path / "root" / "a.gguf"
    file.write_text("v1")
    await put(bench, "a", {"path": "a.gguf"})
    file.write_text("v2")
    assert await wire_of(bench, "a") == bench.worker.loaded
    assert bench.worker.loads == 1
    assert (await ask(bench, "GET", "/adapters/a"))[1]["digest"] == "v2"


async def test_a_file_that_became_bad_fails_its_requests_until_it_changes(bench, tmp_path):
    file = tmp_path / "root" / "a.gguf"
    file.write_text("v1")
    await put(bench, "a", {"path": "a.gguf"})
    file.write_text("bad: it is damaged")
    for _ in range(2):
        status, answer = await ask(bench, "POST", "/completion", {"lora": "a"})
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert "it is damaged" in answer["error"]["message"]
    shown = (await ask(bench, "GET", "/adapters/a"))[1]
    assert shown["state"] == "failed"
    assert "it is damaged" in shown["error"]
    async with bench.get("/v1/models") as answer:
        assert [model["id"] for model in (await answer.json())["data"]] == ["base", "pirate", "robot"]
    file.write_text("v3 is fine")
    assert await wire_of(bench, "a") == bench.worker.loaded


async def test_what_the_worker_refuses_fails_its_request_with_the_reason(bench, tmp_path):
    (tmp_path / "root" / "a.gguf").write_text("worker refuses")
    await put(bench, "a", {"path": "a.gguf"})
    for _ in range(2):
        status, answer = await ask(bench, "POST", "/completion", {"lora": "a"})
        assert (status, answer["error"]["message"]) == (400, "the graph has no such place")
    shown = (await ask(bench, "GET", "/adapters/a"))[1]
    assert (shown["state"], shown["error"]) == ("failed", "the graph has no such place")
    async with bench.get("/metrics") as answer:
        assert "loraproxy_adapter_load_failures_total 1.0" in await answer.text()


async def test_a_watched_file_that_is_being_written_is_a_503_and_no_failure(bench, tmp_path):
    file = tmp_path / "w.gguf"
    file.write_text("v1")
    await bench.catalog.register("w", file, Source.FOLDER)
    file.write_text("bad: half")
    async with bench.post("/completion", {"lora": "w"}) as answer:
        assert answer.status == 503
        assert answer.headers["Retry-After"] == "2"
    assert bench.registry.by_name("w").version is not None
    file.write_text("v2")
    assert await wire_of(bench, "w")


async def test_an_adapter_that_was_not_read_yet_is_read_when_it_is_asked_for_or_in_its_turn(bench, tmp_path, caplog):
    for name, content in (("a", "v1"), ("b", "bad: it is damaged"), ("c", "v1")):
        (tmp_path / f"{name}.gguf").write_text(content)
        bench.registry.put(name, tmp_path / f"{name}.gguf", None, source=Source.FOLDER)
    assert (await ask(bench, "GET", "/adapters/a"))[1]["state"] == "registered"
    async with bench.get("/v1/models") as answer:
        assert len((await answer.json())["data"]) == 6
    assert await wire_of(bench, "c")
    status, answer = await ask(bench, "POST", "/completion", {"lora": "b"})
    assert status == 400
    assert "it is damaged" in answer["error"]["message"]
    assert bench.registry.by_name("a").is_pending
    caplog.set_level("INFO")
    await bench.catalog.read_pending()
    assert (await ask(bench, "GET", "/adapters/a"))[1]["digest"] == "v1"
    assert "1 adapters are read; 0 of them cannot be used" in caplog.messages


async def test_an_adapter_that_is_removed_while_its_request_waits_for_the_load_still_serves_it(bench, tmp_path):
    (tmp_path / "root" / "a.gguf").write_text("v1")
    await put(bench, "a", {"path": "a.gguf"})
    bench.worker.hold_loads = True
    request = asyncio.create_task(ask(bench, "POST", "/completion", {"lora": "a"}))
    await until(lambda: bench.pool.residency.nbytes > 0)
    assert (await ask(bench, "DELETE", "/adapters/a"))[0] == 200
    bench.worker.go_on_loading.release()
    assert (await soon(request))[0] == 200
    await until(lambda: bench.worker.loaded == [])


async def test_more_adapters_than_memory_take_turns(tmp_path):
    (tmp_path / "root").mkdir()
    async with running(tmp_path, memory=2000) as bench:
        for name in "abcdef":
            (tmp_path / "root" / f"{name}.gguf").write_text(name * 1000)
            await put(bench, name, {"path": f"{name}.gguf"})
        answers = await soon(
            asyncio.gather(*(ask(bench, "POST", "/completion", {"lora": name}) for name in "abcdef" * 3))
        )
        assert [status for status, _ in answers] == [200] * 18
        assert len(bench.worker.loaded) <= 2
        memory = (await ask(bench, "GET", "/adapters"))[1]["memory"]
        assert memory == {"used": 2000, "limit": 2000}
        async with bench.get("/metrics") as answer:
            text = await answer.text()
        assert "loraproxy_adapter_resident_bytes 2000.0" in text
        assert "loraproxy_adapter_registered 8.0" in text
        status, answer = await ask(bench, "POST", "/completion", {"lora": ["a", "b", "c"]})
        assert status == 400
        assert "--adapter-memory" in answer["error"]["message"]


async def test_a_new_worker_loads_what_its_requests_ask_for(bench):
    await wire_of(bench, "pirate")
    old = bench.worker
    old.die()
    await soon(bench.made.acquire())
    await soon(bench.worker.started.wait())
    assert bench.worker.loaded == []
    assert await wire_of(bench, "robot") == bench.worker.loaded
    assert (await ask(bench, "GET", "/adapters/pirate"))[1]["state"] == "registered"


async def test_the_api_key_guards_all_of_it(tmp_path):
    async with running(tmp_path, keys=("k",)) as bench:
        for method, path in (
            ("GET", "/adapters"),
            ("GET", "/adapters/pirate"),
            ("PUT", "/adapters/x"),
            ("DELETE", "/adapters/pirate"),
            ("POST", "/v1/load_lora_adapter"),
            ("POST", "/v1/unload_lora_adapter"),
        ):
            assert (await ask(bench, method, path))[0] == 401
        assert "pirate" in bench.registry
