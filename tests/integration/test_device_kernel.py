"""The delta path's kernel for devices, run on the CPU device and held against the kernel for host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import llama_cpp  # noqa: F401  (its libraries must be loaded before the extension that links to them)
import numpy as np
import pytest
from numpy.typing import NDArray

from loraproxy import _native
from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.read import read_adapter
from loraproxy.adapters.tensors import Adapter, LoraTensor, Op
from loraproxy.config import WorkerSettings
from loraproxy.worker.delta import NativeSet
from loraproxy.worker.model import Model
from loraproxy.worker.runtime import Runtime
from servers import demo_adapters

Logits = NDArray[np.float32]

PROMPT = "Tell me about the sea"
PIRATE, BARD, ROBOT, WIZARD, EMBEDDINGS, HEAD, MIXED, ODD = range(8)
CHARACTERS = {"pirate": PIRATE, "bard": BARD, "robot": ROBOT, "wizard": WIZARD}
SLOTS = 6

MAX_KL = 1e-4
"""On an F32 base. ggml's CPU device rounds x and A x to f16 before it multiplies them with f16 weights, which the
kernel for host memory does not: 1e-7 to 2e-5. A quantised base would add its own noise (llama.cpp rounds activations
to 8 bits, and the last bit of a value can move it to the next step): up to 3e-2 for Q4_1, however exact the kernels."""


def random_adapter(base: BaseModel, name: str, targets: Sequence[tuple[str, Op, int]], seed: int) -> Adapter:
    """Pairs of the given ranks; each changes its target's result noticeably."""
    random = np.random.default_rng(seed)
    tensors = []
    for target, op, rank in targets:
        shape = base.shape_of(target)
        assert shape is not None
        n_out, n_in = shape if op is Op.MUL_MAT else shape[::-1]
        a = random.normal(0, n_in**-0.5 if op is Op.MUL_MAT else 1, (rank, n_in)).astype(np.float32)
        b = random.normal(0, 0.3 * rank**-0.5, (n_out, rank)).astype(np.float32)
        tensors.append(LoraTensor(target, op, a, b, 1.0))
    return Adapter(name, Path(name), name, "gguf", tuple(tensors))


def all_adapters(model: Path) -> dict[int, Adapter]:
    base = BaseModel.from_gguf(model)
    characters = {CHARACTERS[name]: read_adapter(name, path, base) for name, path in demo_adapters().items()}
    mul, rows = Op.MUL_MAT, Op.GET_ROWS
    mixed = [("blk.0.attn_q.weight", mul, 1), ("blk.0.ffn_down.weight", mul, 40), ("blk.29.attn_v.weight", mul, 3)]
    made = {
        EMBEDDINGS: [("token_embd.weight", rows, 5)],
        HEAD: [("output.weight", mul, 4), ("token_embd.weight", rows, 16)],
        MIXED: mixed,
        ODD: [("blk.0.attn_q.weight", mul, 64), ("output.weight", mul, 9)],
    }
    return characters | {i: random_adapter(base, str(i), targets, i) for i, targets in made.items()}


@dataclass
class Pair:
    """The same model twice: with the kernel for host memory, and with the one for devices."""

    host: Runtime
    device: Runtime
    adapters: dict[int, Adapter]

    def insert(self, *ids: int) -> None:
        for i in ids:
            weights = self.host.delta.prepare(self.adapters[i])  # the same graph: its targets are the device's too
            self.host.delta.insert(i, weights)
            self.device.delta.insert(i, weights)

    def remove(self, *ids: int) -> None:
        for runtime in (self.host, self.device):
            for i in ids:
                runtime.delta.remove(i)


@pytest.fixture(scope="module")
def pair(model: Path, f32_base: Path) -> Iterator[Pair]:
    settings = WorkerSettings(model=f32_base, socket=Path("unused"), parallel=SLOTS, ctx_size=SLOTS * 256, threads=2)
    pair = Pair(Runtime(Model(f32_base), settings), Runtime(Model(f32_base), settings), all_adapters(model))
    pair.device.delta.native.use_device_kernel()
    yield pair
    pair.host.close()
    pair.device.close()


def prefill(runtime: Runtime, sets: Sequence[NativeSet]) -> list[Logits]:
    """The prompt in every sequence, each under its set; the logits of each last token."""
    tokens = runtime.model.tokenize(PROMPT, add_special=True, parse_special=False)
    found = []
    for sequence, adapters in enumerate(sets):
        runtime.clear(sequence)
        runtime.prefill(sequence, tokens, 0, adapters, True)
        found.append(_native.logits(runtime.address, len(tokens) - 1))
    return found


def step(runtime: Runtime, sets: Sequence[NativeSet], position: int, tokens: Sequence[int]) -> list[Logits]:
    """One token of every sequence in one decode."""
    n = len(sets)
    runtime.step(list(tokens[:n]), [position] * n, 0, list(sets))
    return [_native.logits(runtime.address, row) for row in range(n)]


def run(runtime: Runtime, sets: Sequence[NativeSet]) -> list[Logits]:
    """Prompts and then two steps, the second with the sets handed on from one sequence to the next."""
    length = len(runtime.model.tokenize(PROMPT, add_special=True, parse_special=False))
    tokens = runtime.model.tokenize(" sea stars moon ship wind night", add_special=False, parse_special=False)
    found = prefill(runtime, sets)
    found += step(runtime, sets, length, tokens)
    return found + step(runtime, [*sets[1:], sets[0]], length + 1, tokens)


def kl(p_logits: Logits, q_logits: Logits) -> float:
    """KL(p || q) of the softmax of two rows of logits, in nats."""
    p, q = (x.astype(np.float64) - np.logaddexp.reduce(x.astype(np.float64)) for x in (p_logits, q_logits))
    return float(np.sum(np.exp(p) * (p - q)))


def agree(pair: Pair, sets: Sequence[NativeSet]) -> list[Logits]:
    """Run both kernels and compare all logits; those of the device are returned."""
    host, device = run(pair.host, sets), run(pair.device, sets)
    distances = [kl(a, b) for a, b in zip(host, device, strict=True)]
    print("KL:", " ".join(f"{d:.1e}" for d in distances))
    assert max(distances) < MAX_KL
    return device


def differ(a: Sequence[Logits], b: Sequence[Logits]) -> list[bool]:
    return [kl(x, y) > 10 * MAX_KL for x, y in zip(a, b, strict=True)]


def test_both_kernels_agree_on_four_characters_and_the_base_in_one_batch(pair: Pair) -> None:
    ids = list(CHARACTERS.values())
    pair.insert(*ids)
    logits = agree(pair, [*[[(i, 1.0)] for i in ids], []])
    base = run(pair.host, [[]] * 5)
    n = len(ids) + 1
    assert differ(logits[:n], base[:n]) == [True, True, True, True, False]
    assert np.array_equal(logits[n - 1], base[n - 1]), "a prompt without adapters is the base's to the last bit"
    pair.remove(*ids)


def test_both_kernels_agree_on_several_adapters_of_several_ranks_in_one_set(pair: Pair) -> None:
    pair.insert(PIRATE, BARD, MIXED, ODD)
    sets: list[NativeSet] = [
        [(PIRATE, 0.5), (BARD, 0.75)],
        [(MIXED, 1.0), (ODD, -1.0)],
        [],
        [(PIRATE, 1.0), (BARD, -0.25), (MIXED, 0.5), (ODD, 2.0)],
        [(ODD, 1.0)],
    ]
    logits = agree(pair, sets)
    assert all(differ([logits[0], logits[1], logits[3], logits[4]], [logits[2]] * 4))
    pair.remove(PIRATE, BARD, MIXED, ODD)


def test_both_kernels_agree_on_embeddings_and_on_the_output_head(pair: Pair) -> None:
    pair.insert(EMBEDDINGS, HEAD, ODD)
    sets: list[NativeSet] = [[(EMBEDDINGS, 1.0)], [(HEAD, 1.0)], [], [(EMBEDDINGS, 0.5), (HEAD, -0.5), (ODD, 1.0)]]
    logits = agree(pair, sets)
    assert all(differ([logits[0], logits[1], logits[3]], [logits[2]] * 3))
    pair.remove(EMBEDDINGS, HEAD, ODD)


def test_adapters_enter_and_leave_between_steps(pair: Pair) -> None:
    pair.insert(MIXED)
    agree(pair, [[(MIXED, 1.0)], []])
    pair.insert(ODD, PIRATE)  # of higher rank, and more than there was room for
    agree(pair, [[(MIXED, 1.0)], [(ODD, 1.0), (PIRATE, 1.0)]])
    pair.remove(ODD)
    before = agree(pair, [[(MIXED, 8.0)], [(PIRATE, 1.0)]])
    pair.remove(MIXED, PIRATE)
    pair.adapters[PIRATE], pair.adapters[MIXED] = pair.adapters[MIXED], pair.adapters[PIRATE]
    pair.insert(PIRATE, MIXED)  # other weights under the ids of those that left
    after = agree(pair, [[(MIXED, 1.0)], [(PIRATE, 8.0)]])
    assert [kl(a, b) < MAX_KL for a, b in zip(before[:2], reversed(after[:2]), strict=True)] == [True, True]
    pair.remove(PIRATE, MIXED)
    base = agree(pair, [[], []])
    assert all(differ(before[:2], base[:2]))
