"""A set composed into one file, in a stock llama-server: the distribution of the set's adapters applied one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.compose import compose
from loraproxy.adapters.gguf_write import AdapterDtype, write_gguf_adapter
from loraproxy.adapters.read import read_adapter
from servers import REPOSITORY, PeerUnavailable, Server, demo_adapters, running_llama_server

MEMBERS = {"pirate": 0.5, "wizard": 0.7}
DTYPES: tuple[AdapterDtype, ...] = ("f32", "f16")
PROMPTS = [
    case["prompt_tokens"]
    for name in ("base", "pirate", "wizard")
    for case in json.loads((REPOSITORY / "tests" / "expected.json").read_text())[name][:1]
]
VOCABULARY = 49152
SEPARATE = [{"id": number, "scale": scale} for number, scale in enumerate(MEMBERS.values())]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, f32_base: Path) -> Iterator[Server]:
    """llama-server over SmolLM2 in F32 with the members, then the composed files."""
    folder = tmp_path_factory.mktemp("composed")
    base = BaseModel.from_gguf(f32_base)
    members = [(read_adapter(name, demo_adapters()[name], base), scale) for name, scale in MEMBERS.items()]
    files = [folder / f"{adapter.name}.gguf" for adapter, _ in members]
    for (adapter, _), file in zip(members, files, strict=True):
        write_gguf_adapter(adapter, base, file, "f32")
    for dtype in DTYPES:
        files.append(folder / f"composed-{dtype}.gguf")
        write_gguf_adapter(compose(members, base), base, files[-1], dtype)
    loras = [argument for file in files for argument in ("--lora", str(file))]
    try:
        with running_llama_server(folder, ["-m", str(f32_base), *loras, "-np", "1", "-c", "512", "-t", "2"]) as peer:
            yield peer
    except PeerUnavailable as reason:
        pytest.skip(str(reason))


def log_probabilities(server: Server, prompt: list[int], lora: list[dict[str, Any]]) -> NDArray[np.float64]:
    """The natural logarithm of each token's probability to come next."""
    request = {"prompt": prompt, "n_predict": 1, "n_probs": VOCABULARY, "cache_prompt": False, "lora": lora}
    status, _, body = server.request("POST", "/completion", json.dumps(request).encode())
    assert status == 200, body[:400]
    (step,) = json.loads(body)["completion_probabilities"]
    found = np.full(VOCABULARY, np.nan)
    for token in step["top_logprobs"]:
        found[token["id"]] = token["logprob"]
    assert not np.isnan(found).any()
    return found


def divergence(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """The Kullback-Leibler divergence of q from p, in nats."""
    return float((np.exp(p) * (p - q)).sum())


@pytest.fixture(scope="module")
def separately(server: Server) -> list[NDArray[np.float64]]:
    """What comes next after each of PROMPTS, the members applied one by one."""
    found = [log_probabilities(server, prompt, SEPARATE) for prompt in PROMPTS]
    one_alone = log_probabilities(server, PROMPTS[0], SEPARATE[:1])
    assert divergence(found[0], one_alone) > 1e-3, "every member makes a difference"
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_composed_file_gives_the_distribution_of_its_members_applied_separately(
    server: Server, separately: list[NDArray[np.float64]], dtype: AdapterDtype
) -> None:
    composed = [{"id": len(MEMBERS) + DTYPES.index(dtype), "scale": 1.0}]
    for prompt, expected in zip(PROMPTS, separately, strict=True):
        assert divergence(expected, log_probabilities(server, prompt, composed)) < 1e-4
