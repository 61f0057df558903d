"""Derived models: named by content, made once, found again, removed with an adapter."""

import asyncio
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from ollama_bench import TINY, client_of, member, tiny_adapter, tiny_base, tiny_ollama

from loraproxy.adapters.compose import compose
from loraproxy.adapters.read import read_adapter
from loraproxy.backends.ollama_api import OllamaClient
from loraproxy.backends.ollama_models import DerivedModels
from loraproxy.errors import InvalidAdapterFile, NotFound, NotSupported, Unavailable
from servers import free_port


class Watched(OllamaClient):
    """A client that counts what is asked and can be held before it makes a model."""

    def __init__(self, session, url):
        super().__init__(session, url)
        self.calls = Counter()
        self.reached = asyncio.Event()
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def create(self, *arguments, **options):
        self.calls["create"] += 1
        self.reached.set()
        await self.may_go_on.wait()
        await super().create(*arguments, **options)

    async def push_blob(self, *arguments):
        self.calls["push"] += 1
        await super().push_blob(*arguments)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def members(tmp_path_factory, base):
    folder = tmp_path_factory.mktemp("adapters")
    return {name: member(tiny_adapter(folder, name, seed), base) for seed, name in enumerate(("pirate", "bard"))}


@pytest.fixture(scope="module")
def server(tmp_path_factory, base):
    with tiny_ollama(tmp_path_factory.mktemp("ollama"), base) as running:
        yield running


@pytest.fixture
async def client(server):
    async with client_of(server.base_url) as plain:
        client = Watched(plain._session, server.base_url)
        yield client
        for entry in await client.tags():
            if entry.name != "tiny:latest":
                await client.delete(entry.name)


@pytest.fixture
async def models(client, base, tmp_path):
    models = DerivedModels(client, TINY, base, folder=tmp_path)
    yield models
    await models.close()
    assert list(tmp_path.iterdir()) == [], "temporary files are removed"


def pair(members):
    return [replace(members["pirate"], scale=0.5), replace(members["bard"], scale=0.7)]


async def names(client):
    return {entry.name for entry in await client.tags()} - {"tiny:latest"}


async def test_a_set_is_made_a_model_that_holds_the_composed_adapter(server, client, models, members, base, tmp_path):
    name = await models.name_for(pair(members))
    assert name.startswith("loraproxy-")
    assert await names(client) == {f"{name}:latest"}
    modelfile = (await client.show(name))["modelfile"]
    (line,) = [line for line in modelfile.splitlines() if line.startswith("ADAPTER ")]
    made = tmp_path / "made.gguf"
    shutil.copyfile(line.removeprefix("ADAPTER "), made)
    parts = [(read_adapter(m.name, m.path, base), m.scale) for m in pair(members)]
    (expected,), (found,) = compose(parts, base).tensors, read_adapter("made", made, base).tensors
    np.testing.assert_allclose(found.b @ found.a * found.scale, expected.b @ expected.a, rtol=1e-2, atol=2e-2)
    made.unlink()


async def test_it_is_made_once_and_then_known(client, models, members):
    first = await models.name_for(pair(members))
    assert await models.name_for(list(reversed(pair(members)))) == first
    assert client.calls == {"create": 1, "push": 1}


async def test_many_that_ask_at_once_wait_for_one_creation(client, models, members):
    found = await asyncio.gather(*(models.name_for(pair(members)) for _ in range(20)))
    assert len(set(found)) == 1
    assert client.calls == {"create": 1, "push": 1}


async def test_a_later_run_finds_it(client, models, members, base):
    name = await models.name_for(pair(members))
    later = DerivedModels(client, TINY, base)
    assert await later.name_for(pair(members)) == name
    assert client.calls["create"] == 1


async def test_other_scales_are_another_model(client, models, members):
    sets = [pair(members), [replace(members["pirate"], scale=0.5)], [replace(members["pirate"], scale=0.51)]]
    found = [await models.name_for(one) for one in sets]
    assert await names(client) == {f"{name}:latest" for name in found}
    assert len(set(found)) == 3


async def test_another_base_is_another_model(client, models, members, base):
    name = await models.name_for(pair(members))
    await client.create("other", TINY, {}, note="another manifest")
    others = DerivedModels(client, "other", base)
    assert await others.name_for(pair(members)) != name


async def test_the_empty_set_is_the_base_model(client, models, members):
    assert await models.name_for([]) == TINY
    assert await models.name_for([replace(members["pirate"], scale=0.0)]) == TINY
    assert client.calls == {}


async def test_an_adapter_takes_every_model_it_is_in_with_it(client, models, members, base):
    kept = await models.name_for([members["bard"]])
    gone = [await models.name_for(pair(members)), await models.name_for([members["pirate"]])]
    later = DerivedModels(client, TINY, base)
    assert sorted(await later.remove_adapter(members["pirate"].digest)) == sorted(f"{name}:latest" for name in gone)
    assert await names(client) == {f"{kept}:latest"}


async def test_after_its_removal_a_set_is_made_again(client, models, members):
    name = await models.name_for(pair(members))
    await models.remove_adapter(members["bard"].digest)
    assert await models.name_for(pair(members)) == name
    assert await names(client) == {f"{name}:latest"}


async def test_what_the_server_lost_is_made_again_once_it_is_forgotten(client, models, members):
    name = await models.name_for(pair(members))
    await client.delete(name)
    models.forget(name)
    assert await models.name_for(pair(members)) == name
    assert client.calls["create"] == 2


async def test_cancelling_one_that_waits_disturbs_nobody(client, models, members):
    client.may_go_on.clear()
    first, second = (asyncio.create_task(models.name_for(pair(members))) for _ in range(2))
    await client.reached.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    client.may_go_on.set()
    assert (await second).startswith("loraproxy-")
    assert client.calls["create"] == 1


async def test_a_removal_waits_for_what_is_being_made(client, models, members):
    client.may_go_on.clear()
    making = asyncio.create_task(models.name_for(pair(members)))
    await client.reached.wait()
    removing = asyncio.create_task(models.remove_adapter(members["pirate"].digest))
    client.may_go_on.set()
    name = await making
    assert await removing == [f"{name}:latest"]
    assert await names(client) == set()


async def test_closing_ends_what_is_being_made(client, models, members):
    client.may_go_on.clear()
    making = asyncio.create_task(models.name_for(pair(members)))
    await client.reached.wait()
    await models.close()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert await names(client) == set()


async def test_a_failure_reaches_all_that_wait_and_is_not_kept(client, models, members, base, tmp_path_factory):
    path = tiny_adapter(tmp_path_factory.mktemp("changing"), "changing", 7)
    content = path.read_bytes()
    one = member(path, base)
    tiny_adapter(path.parent, "changing", 8)
    errors = await asyncio.gather(*(models.name_for([one]) for _ in range(3)), return_exceptions=True)
    assert {type(error) for error in errors} == {InvalidAdapterFile}
    assert "has changed since it was registered" in str(errors[0])
    path.write_bytes(content)
    assert (await models.name_for([one])).startswith("loraproxy-")


async def test_a_base_model_that_is_not_there_is_named_with_what_is(client, base, members):
    models = DerivedModels(client, "llama9", base)
    with pytest.raises(NotFound, match=r"has no model 'llama9'; it has: tiny:latest"):
        await models.name_for(pair(members))


async def test_a_server_that_takes_no_adapters_or_is_away_says_so(base, members, tmp_path):
    with tiny_ollama(tmp_path, base, "--refuse-adapters") as newer:
        async with client_of(newer.base_url) as client:
            with pytest.raises(NotSupported, match="cannot make models with LoRA adapters"):
                await DerivedModels(client, TINY, base).name_for(pair(members))
    async with client_of(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(Unavailable):
            await DerivedModels(client, TINY, base).name_for(pair(members))
