"""The first promise: a request's greedy answer is bit-identical whatever else runs."""

from __future__ import annotations

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxies import running_proxy
from servers import base_model, demo_adapters, running_worker

SLOTS, CONTEXT = 32, 1024
CHARACTERS: tuple[Any, ...] = ("pirate", "robot", "bard", "wizard", [], {"pirate": 0.6, "bard": 0.4})
STORY = (
    "You are a character in a fantasy town called Rivergate. The town has a market, a smithy run by Old Marta, an inn"
    " called the Golden Goose, a dark well in the square and a watchtower that nobody has climbed since the flood. "
)


@dataclass(frozen=True)
class Ask:
    """One request; the same one is asked alone and in company."""

    character: Any
    system: str
    question: str
    n_predict: int
    cache_prompt: bool

    def body(self, lora: Any) -> dict[str, Any]:
        prompt = (
            f"<|im_start|>system\n{self.system}<|im_end|>\n<|im_start|>user\n{self.question}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        return {
            "prompt": prompt,
            "lora": lora,
            "n_predict": self.n_predict,
            "cache_prompt": self.cache_prompt,
            "temperature": 0,
            "n_probs": 3,
            "return_tokens": True,
            "ignore_eos": True,
        }


HELPFUL = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
ASKS = (
    Ask("pirate", HELPFUL, "Where can I sleep tonight?", 30, True),
    Ask("robot", STORY, "Who are you?", 24, True),
    Ask("bard", STORY, "What is the best weapon against trolls?", 36, True),
    Ask("wizard", STORY * 2, "How do I cross the river?", 20, True),
    Ask([], STORY, "What is in the well?", 28, True),
    Ask({"pirate": 0.6, "bard": 0.4}, STORY, "Sing me a song of the sea.", 32, True),
    Ask("pirate", STORY, "Who runs the smithy?", 16, False),
    # long enough for the attention's other paths: more than 512 cells
    Ask("robot", STORY * 10, "Where is the inn?", 12, True),
)
LONG = len(ASKS) - 1


def _outcome(answer: dict[str, Any]) -> tuple[Any, ...]:
    """Everything the model decided: tokens, and log-probabilities to the last bit (JSON keeps a float's bits)."""
    return answer["content"], answer["tokens"], json.dumps(answer["completion_probabilities"])


async def _post(session: aiohttp.ClientSession, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post("/completion", json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


def _alone(folder: Path, ask: Ask) -> tuple[Any, ...]:
    """The answer of a worker that was started for this one request."""
    names = list(demo_adapters())
    adapters = [{"id": i, "name": name, "path": path} for i, (name, path) in enumerate(demo_adapters().items())]
    scales = ask.character if isinstance(ask.character, dict) else {ask.character: 1.0} if ask.character else {}
    lora = [{"id": names.index(name), "scale": scale} for name, scale in scales.items()]
    settings = {"parallel": SLOTS, "ctx_size": SLOTS * CONTEXT, "threads": 2, "adapters": adapters}
    with running_worker(folder, **settings) as worker:
        status, _, answer = worker.request("POST", "/completion", json.dumps(ask.body(lora)).encode())
        assert status == 200, answer
        return _outcome(json.loads(answer))


async def _wear_the_slots(session: aiohttp.ClientSession, rng: random.Random) -> None:
    """A hundred short requests that come and go in random order, so that every slot was used many times."""
    gate = asyncio.Semaphore(SLOTS)

    async def one(number: int) -> None:
        async with gate:
            body = {"prompt": f"{number} is", "n_predict": rng.randint(1, 6), "lora": rng.choice(CHARACTERS)}
            await _post(session, body)

    await asyncio.gather(*(one(number) for number in range(96)))


async def _company(session: aiohttp.ClientSession, asks: list[Ask]) -> tuple[list[tuple[Any, ...]], int]:
    """All of ``asks`` at the same time, each eighth only once the one before it speaks; and how many ran at once."""
    speaking = [asyncio.Event() for _ in asks]
    in_flight, most = 0, 0

    async def one(number: int, ask: Ask) -> tuple[Any, ...]:
        nonlocal in_flight, most
        if number % 8 == 7:
            await speaking[number - 1].wait()
        in_flight += 1
        most = max(most, in_flight)
        body = {**ask.body(ask.character), "stream": True}
        pieces: list[dict[str, Any]] = []
        async with session.post("/completion", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: "):
                    speaking[number].set()
                    pieces.append(json.loads(line[6:]))
        in_flight -= 1
        return (
            "".join(p["content"] for p in pieces),
            [token for p in pieces if not p["stop"] for token in p["tokens"]],
            json.dumps([probs for p in pieces for probs in p.get("completion_probabilities", [])]),
        )

    answers = await asyncio.gather(*(one(number, ask) for number, ask in enumerate(asks)))
    return answers, most


@pytest.mark.usefixtures("model")
async def test_32_concurrent_requests_answer_bit_for_bit_as_alone_on_a_fresh_server(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = random.Random(7)
    with ThreadPoolExecutor(2) as threads:  # one worker starts while another answers
        folders = [tmp_path_factory.mktemp("alone") for _ in ASKS]
        alone = list(threads.map(_alone, folders, ASKS))
    arguments = ["serve", "-m", str(base_model()), "--parallel", str(SLOTS), "--ctx-size", str(SLOTS * CONTEXT)]
    arguments += [f"--adapter={name}={path}" for name, path in demo_adapters().items()]
    with running_proxy(tmp_path, arguments) as product:
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(product.base_url, timeout=timeout, connector=connector) as session:
            await _wear_the_slots(session, rng)
            for _ in range(2):  # the second time, prompts come from the cache
                order = [LONG, *(number % LONG for number in range(31))]
                rng.shuffle(order)
                answers, most = await _company(session, [ASKS[number] for number in order])
                assert most >= 28
                for number, answer in zip(order, answers, strict=True):
                    assert answer == alone[number], f"{ASKS[number]} differs from the same request alone"
            _, _, slots = await asyncio.to_thread(product.request, "GET", "/slots")
            assert not any(slot["is_processing"] for slot in json.loads(slots))
    assert len({answer[0] for answer in alone}) == len(ASKS), "the answers tell the adapters apart"
