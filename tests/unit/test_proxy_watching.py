"""The watched folder: what comes, changes and goes there, and what is left alone."""

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from standin import running, soon

from loraproxy.adapters.folder import Listing, list_folder
from loraproxy.adapters.names import check_name
from loraproxy.adapters.registry import Source
from loraproxy.proxy.catalog import Wish
from loraproxy.proxy.watching import Follower, Watcher

QUICK = 0.01


class Watched:
    """A folder, and a watcher that looks at it often."""

    def __init__(self, bench, folder: Path) -> None:
        self.registry, self.folder = bench.registry, folder
        self.watcher = Watcher(bench.catalog, folder, Listing(), QUICK)

    def write(self, name: str, content: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        return path

    def digest(self, name: str) -> str | None:
        """Of what a request would run under; None: there is no such adapter."""
        if name not in self.registry:
            return None
        adapter = self.registry.by_name(name)
        return adapter.version.summary.digest if adapter.version else adapter.error

    async def until(self, condition) -> None:
        async def poll():
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(QUICK)

        await soon(poll())

    async def looks(self, count: int = 3) -> None:
        """Let the watcher look some more times."""
        mark = self.write(f"mark{count}.gguf", "mark")
        await self.until(lambda: self.digest(mark.stem) == "mark")
        mark.unlink()
        await self.until(lambda: self.digest(mark.stem) is None)


@pytest_asyncio.fixture
async def watched(tmp_path):
    (tmp_path / "watched").mkdir()
    async with running(tmp_path) as bench, watching(Watched(bench, tmp_path / "watched")) as watched:
        yield watched


@asynccontextmanager
async def watching(watched):
    task = asyncio.create_task(watched.watcher.run())
    try:
        yield watched
    finally:
        assert not task.done()
        task.cancel()
        await asyncio.wait({task})


async def test_a_file_or_folder_that_appears_changes_and_goes_does_so_as_an_adapter(watched):
    file = watched.write("one.gguf", "v1")
    watched.write("two/adapter_config.json", "{}")
    watched.write("two/adapter_model.safetensors", "v1")
    await watched.until(lambda: watched.digest("one") == watched.digest("two") == "v1")
    assert watched.registry.by_name("two").source is Source.FOLDER
    watched.write("one.gguf", "v2 now")
    watched.write("two/adapter_model.safetensors", "v2 now")
    await watched.until(lambda: watched.digest("one") == watched.digest("two") == "v2 now")
    file.unlink()
    (watched.folder / "two" / "adapter_config.json").unlink()
    await watched.until(lambda: watched.digest("one") is None and watched.digest("two") is None)


async def test_a_file_is_not_read_while_it_grows(watched):
    path = watched.folder / "slow.gguf"
    with path.open("w") as file:
        for _ in range(30):
            file.write("bad ")
            file.flush()
            await asyncio.sleep(QUICK / 2)
            assert watched.digest("slow") is None
        file.seek(0)
        file.write("now it is complete")
    await watched.until(lambda: (watched.digest("slow") or "").startswith("now"))


async def test_what_cannot_be_applied_fails_alone_and_is_taken_up_when_it_is_repaired(watched, caplog):
    watched.write("odd.gguf", "bad: another base")
    await watched.until(lambda: "bad: another base" in (watched.digest("odd") or ""))
    await watched.looks()
    assert sum("bad: another base" in message for message in caplog.messages) == 1, "it is said once"
    watched.write("odd.gguf", "v1")
    await watched.until(lambda: watched.digest("odd") == "v1")


async def test_names_that_clash_or_are_not_allowed_are_reported_once_and_left_alone(watched, caplog, tmp_path):
    watched.write("a/adapter_config.json", "{}")
    watched.write("a/adapter_model.safetensors", "folder")
    watched.write("a.gguf", "file")
    watched.write("b c.gguf", "v1")
    watched.write("pirate.gguf", "v1")
    watched.write(".hidden.gguf", "v1")
    watched.write("notes.txt", "v1")
    await watched.until(lambda: len(watched.watcher.problems) == 3)
    await watched.looks()
    assert watched.digest("a") == "folder"
    assert watched.digest("pirate") == "0", "the configured one stays"
    problems = {Path(path).name: reason for path, reason in watched.watcher.problems.items()}
    assert problems["a.gguf"].startswith("a has the same name and is used instead")
    assert "'b c' cannot name an adapter" in problems["b c.gguf"]
    assert problems["pirate.gguf"] == f"the name 'pirate' is taken (configured: {tmp_path / 'pirate'})"
    assert sum("is left alone" in message for message in caplog.messages) == 3


async def test_a_folder_that_lacks_its_configuration_and_weights_without_a_folder_are_reported_once(watched, caplog):
    watched.write("weights/adapter_model.safetensors", "v1")
    watched.write("nested/inner.gguf", "v1")
    watched.write("loose.safetensors", "v1")
    (watched.folder / "empty").mkdir()
    await watched.until(lambda: len(watched.watcher.problems) == 3)
    await watched.looks()
    problems = {Path(path).name: reason for path, reason in watched.watcher.problems.items()}
    an_adapter = "an adapter's folder has adapter_config.json and adapter_model.safetensors"
    assert problems["weights"] == f"the folder has no adapter_config.json; {an_adapter}"
    assert problems["nested"] == "the folder has no adapter_config.json; move inner.gguf out of it"
    assert problems["loose.safetensors"].startswith("weights alone are no adapter")
    said = [message for message in caplog.messages if "is left alone" in message]
    assert sorted(said) == sorted(
        f"adapters folder: {path} is left alone: {reason}" for path, reason in watched.watcher.problems.items()
    )
    watched.write("weights/adapter_config.json", "{}")
    await watched.until(lambda: watched.digest("weights") == "v1")
    assert len(watched.watcher.problems) == 2


async def test_a_folder_that_is_being_copied_in_is_not_reported(watched, caplog):
    weights = watched.write("slow/adapter_model.safetensors", "v")
    with weights.open("a") as file:
        for _ in range(30):
            file.write("1")
            file.flush()
            await asyncio.sleep(QUICK / 2)
    watched.write("slow/adapter_config.json", "{}")
    await watched.until(lambda: watched.digest("slow") is not None)
    assert not watched.watcher.problems
    assert not any("is left alone" in message for message in caplog.messages)


async def test_a_name_that_becomes_free_is_taken_by_the_folder(watched, tmp_path):
    watched.write("pirate.gguf", "v1")
    await watched.until(lambda: watched.watcher.problems)
    watched.registry.remove("pirate")
    await watched.until(lambda: watched.digest("pirate") == "v1")
    assert not watched.watcher.problems


async def test_a_folder_that_cannot_be_read_keeps_its_adapters(watched, caplog):
    watched.write("one.gguf", "v1")
    await watched.until(lambda: watched.digest("one") == "v1")
    watched.folder.rename(watched.folder.with_name("away"))
    await watched.until(lambda: any("its adapters stay as they are" in message for message in caplog.messages))
    assert watched.digest("one") == "v1"
    watched.folder.with_name("away").rename(watched.folder)
    watched.write("two.gguf", "v1")
    await watched.until(lambda: watched.digest("two") == "v1")
    assert watched.digest("one") == "v1"
    assert sum("its adapters stay" in message for message in caplog.messages) == 1


async def test_many_at_once_are_all_taken_up(watched):
    for number in range(200):
        watched.write(f"npc-{number}.gguf", "v1")
    await watched.until(lambda: len(watched.registry) == 202)


def test_a_link_in_the_folder_is_an_adapter_like_any_other(tmp_path):
    (tmp_path / "away.bin").write_text("v1")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "here.gguf").symlink_to(tmp_path / "away.bin")
    (tmp_path / "folder" / "dangling.gguf").symlink_to(tmp_path / "nothing")
    assert list(list_folder(tmp_path / "folder", check_name).adapters) == ["here"]


class Followed(Watched):
    """A folder that nothing is registered from but by its path."""

    def __init__(self, bench, folder: Path) -> None:
        super().__init__(bench, folder)
        self.watcher = Follower(bench.catalog, QUICK)


@pytest_asyncio.fixture
async def followed(tmp_path):
    (tmp_path / "root").mkdir()
    async with running(tmp_path) as bench, watching(Followed(bench, tmp_path / "root")) as followed:
        followed.bench = bench
        yield followed


async def runs_under(bench, name: str) -> int:
    async with bench.post("/completion", {"lora": name}) as answer:
        [entry] = json.loads((await answer.json())["body"])["lora"]
        return entry["id"]


@pytest.mark.parametrize("source", [Source.CONFIGURED, Source.API])
async def test_a_registered_file_that_is_written_anew_takes_effect_though_its_old_version_is_loaded(followed, source):
    bench = followed.bench
    path = followed.write("a.gguf", "v1")
    before = (await bench.catalog.register("a", path, source, Wish(scale=0.5))).version.wire_id
    assert await runs_under(bench, "a") == before
    followed.write("a.gguf", "version 2")
    await followed.until(lambda: followed.digest("a") == "version 2")
    after = await runs_under(bench, "a")
    assert after != before
    await followed.until(lambda: bench.worker.loaded == [after])
    adapter = bench.registry.by_name("a")
    assert (adapter.source, adapter.default_scale) == (source, 0.5)


async def test_a_registered_file_that_is_gone_or_damaged_leaves_what_was_registered(followed, caplog):
    bench = followed.bench
    path = followed.write("a.gguf", "v1")
    before = (await bench.catalog.register("a", path, Source.API)).version.wire_id
    assert await runs_under(bench, "a") == before
    path.unlink()
    followed.write("a.gguf", "bad: half of it")
    await followed.until(lambda: "its file has changed, but: " in caplog.text)
    assert await runs_under(bench, "a") == before
    followed.write("other.gguf", "v1")
    await bench.catalog.register("other", followed.folder / "other.gguf", Source.API)
    followed.write("other.gguf", "version 2")
    await followed.until(lambda: followed.digest("other") == "version 2")
    assert caplog.text.count("its file has changed, but: ") == 1, "it is told once"
    followed.write("a.gguf", "version 3")
    await followed.until(lambda: followed.digest("a") == "version 3")
    assert await runs_under(bench, "a") != before
