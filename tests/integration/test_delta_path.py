"""The delta path on tiny random models: arithmetic on odd shapes, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import llama_cpp  # noqa: F401  (the extension links to its libraries)
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from gguf_tools import gguf_name, make_tiny_llama, tiny_llama_shapes
from loraproxy import _native
from loraproxy.adapters.tensors import Adapter, LoraTensor, Op
from loraproxy.config import WorkerSettings
from loraproxy.errors import InvalidAdapterFile
from loraproxy.worker.delta import DeltaPath
from loraproxy.worker.model import Model
from loraproxy.worker.runtime import Runtime, StepFailed

PROMPT = [1, 290, 40, 300, 41, 263, 99, 310]
# nothing is a multiple of a vector's or a tile's length
SIZES = {"n_embd": 72, "n_ff": 100, "n_head": 4, "n_head_kv": 2, "n_layer": 2}
WHOLE_BLOCKS = {**SIZES, "n_embd": 64, "n_ff": 96}
RANKS = (1, 3, 4, 5, 17, 33)
KERNELS = [name for name in ("plain", "avx2", "avx512", "neon") if _native.Delta.has_kernels(name)]


def start(path: Path, kernels: str = "", parallel: int = 4, adapter_type: Literal["auto", "f16"] = "auto") -> Runtime:
    settings = WorkerSettings(
        model=path,
        socket=Path("unused"),
        parallel=parallel,
        ctx_size=parallel * 256,
        threads=2,
        adapter_type=adapter_type,
    )
    return Runtime(Model(path), settings, kernels=kernels)


def random_adapter(seed: int, *, sizes: dict[str, int] = SIZES) -> Adapter:
    """A pair for every matrix, the tied head and the embeddings, each of another rank."""
    random = np.random.default_rng(seed)
    tensors = []
    for number, (module, (n_out, n_in)) in enumerate(tiny_llama_shapes(**sizes, n_vocab=320).items()):
        rank = RANKS[(number + seed) % len(RANKS)]
        name = gguf_name(module)
        if name == "token_embd.weight":
            a = random.normal(0, 1, (rank, n_out)).astype(np.float32)
            b = random.normal(0, 0.3 / rank, (n_in, rank)).astype(np.float32)
            tensors.append(LoraTensor(name, Op.GET_ROWS, a, b, 0.1))
            continue
        a = random.normal(0, 1, (rank, n_in)).astype(np.float32)
        b = random.normal(0, 0.2 / rank, (n_out, rank)).astype(np.float32)
        tensors.append(LoraTensor(name, Op.MUL_MAT, a, b, 0.25))
    return Adapter(f"random-{seed}", Path("random"), str(seed), "peft", tuple(tensors))


def merged(adapter: Adapter, scale: float) -> dict[str, NDArray[np.float32]]:
    deltas = {}
    for tensor in adapter.tensors:
        delta = np.float32(scale * tensor.scale) * (tensor.b @ tensor.a)
        deltas[tensor.target] = delta.T if tensor.op is Op.GET_ROWS else delta
    return deltas


def last_logits(runtime: Runtime, adapters: list[tuple[int, float]]) -> NDArray[np.float32]:
    runtime.clear(0)
    runtime.prefill(0, PROMPT[:-1], 0, adapters, False)
    runtime.step([PROMPT[-1]], [len(PROMPT) - 1], 0, [adapters])
    return _native.logits(runtime.address, 0)


def distance(left: NDArray[np.float32], right: NDArray[np.float32]) -> float:
    return float(np.abs(left - right).max() / right.std())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # untied, since merging a delta of the embeddings into a tied model would change its head as well
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", **SIZES, tied=False)


@pytest.fixture
def runtime(tiny: Path) -> Iterator[Runtime]:
    runtime = start(tiny)
    yield runtime
    runtime.close()


@pytest.mark.parametrize("kernels", KERNELS)
def test_every_kernel_equals_merged_weights_on_odd_shapes(tiny: Path, tmp_path: Path, kernels: str) -> None:
    adapter, scale = random_adapter(1), 0.8
    with_delta = start(tiny, kernels)
    path = make_tiny_llama(tmp_path / "merged.gguf", **SIZES, tied=False, deltas=merged(adapter, scale))
    with_merged = start(path)
    try:
        with_delta.delta.insert(7, with_delta.delta.prepare(adapter))
        ours, theirs = last_logits(with_delta, [(7, scale)]), last_logits(with_merged, [])
        assert distance(ours, theirs) < 0.01
        assert distance(last_logits(with_delta, []), theirs) > 0.3
        assert with_delta.delta.native.kernel_name == kernels
    finally:
        with_delta.close()
        with_merged.close()


def test_several_adapters_of_a_set_add_up_each_at_its_scale(runtime: Runtime, tmp_path: Path) -> None:
    adapters = {3: random_adapter(2), 5: random_adapter(3)}
    for number, adapter in adapters.items():
        runtime.delta.insert(number, runtime.delta.prepare(adapter))
    first, second = merged(adapters[3], 0.7), merged(adapters[5], -0.4)
    both = {name: first[name] + second[name] for name in first}
    with_merged = start(make_tiny_llama(tmp_path / "merged.gguf", **SIZES, tied=False, deltas=both))
    try:
        assert distance(last_logits(runtime, [(3, 0.7), (5, -0.4)]), last_logits(with_merged, [])) < 0.02
    finally:
        with_merged.close()


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(
        tmp_path_factory.mktemp("tiny") / "q8.gguf", **WHOLE_BLOCKS, tied=False, dtype=GGMLQuantizationType.Q8_0
    )


@pytest.mark.parametrize("kernels", KERNELS)
def test_every_kernel_keeps_adapters_of_a_quantised_base_in_8_bits(quantised: Path, kernels: str) -> None:
    adapter = random_adapter(1, sizes=WHOLE_BLOCKS)
    logits, nbytes = {}, {}
    for kind in ("auto", "f16"):
        runtime = start(quantised, kernels, adapter_type=kind)
        try:
            runtime.delta.insert(0, runtime.delta.prepare(adapter))
            nbytes[kind] = runtime.delta.nbytes(0)
            logits[kind] = last_logits(runtime, [(0, 1.0)])
            assert distance(last_logits(runtime, []), logits[kind]) > 0.3
        finally:
            runtime.close()
    assert nbytes["auto"] < 0.75 * nbytes["f16"] == 0.75 * adapter.summary.resident_bytes
    assert 0 < distance(logits["auto"], logits["f16"]) < 0.05


def test_a_matrix_with_values_far_above_the_rest_stays_in_f16(quantised: Path) -> None:
    plain = random_adapter(1, sizes=WHOLE_BLOCKS)
    spiked = []
    for tensor in (tensor for tensor in plain.tensors if tensor.b.shape[0] >= 64):
        b = tensor.b.copy()
        b[3] *= 1000  # 8 bits in steps of this would leave nothing of the others
        spiked.append(replace(tensor, b=b))
    adapter = replace(plain, tensors=tuple(spiked))
    logits = []
    for kind in ("auto", "f16"):
        runtime = start(quantised, adapter_type=kind)
        try:
            runtime.delta.insert(0, runtime.delta.prepare(adapter))
            assert runtime.delta.nbytes(0) == adapter.summary.resident_bytes
            logits.append(last_logits(runtime, [(0, 0.01)]))
        finally:
            runtime.close()
    np.testing.assert_array_equal(*logits)


def test_a_large_rank_that_b_does_not_use_hides_no_coarse_ones(quantised: Path) -> None:
    random = np.random.default_rng(0)
    n_embd = WHOLE_BLOCKS["n_embd"]
    a = (0.1 * random.normal(0, 1, (8, n_embd))).astype(np.float32)
    a[1:, 7] = 30  # in steps of this, nothing is left of the rest of the row
    a[0] = 1000 * random.normal(0, 1, n_embd)
    b = random.normal(0, 1, (n_embd, 8)).astype(np.float32)
    b[:, 0] = 0
    adapter = Adapter("hidden", Path("x"), "x", "peft", (LoraTensor("blk.0.attn_q.weight", Op.MUL_MAT, a, b, 1.0),))
    runtime = start(quantised)
    try:
        runtime.delta.insert(0, runtime.delta.prepare(adapter))
        assert runtime.delta.nbytes(0) == adapter.summary.resident_bytes  # f16
    finally:
        runtime.close()


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_rows_of_one_step_are_bit_identical_to_each_alone(tmp_path: Path, dtype: str) -> None:
    path = make_tiny_llama(tmp_path / "tiny.gguf", **WHOLE_BLOCKS, dtype=GGMLQuantizationType[dtype])
    runtime = start(path)
    # the sets name the adapters in every combination, so that groups first meet in another order than alone
    sets: list[list[tuple[int, float]]] = [[(2, 1.0)], [(0, 0.5), (2, 0.3)], [], [(0, 1.0), (1, 1.0), (2, 1.0)]]
    last, position = PROMPT[-1], len(PROMPT) - 1
    try:
        for number in range(3):
            runtime.delta.insert(number, runtime.delta.prepare(random_adapter(number, sizes=WHOLE_BLOCKS)))
        alone = []
        for adapters in sets:
            runtime.clear(0)
            runtime.prefill(0, PROMPT[:-1], 0, adapters, False)
            runtime.step([last], [position], 0, [adapters])
            alone.append(_native.logits(runtime.address, 0))
        for slot, adapters in enumerate(sets):
            runtime.clear(slot)
            runtime.prefill(slot, PROMPT[:-1], 0, adapters, False)
        runtime.step([last] * 4, [position] * 4, 0, sets)
        for row in range(4):
            np.testing.assert_array_equal(_native.logits(runtime.address, row), alone[row])
    finally:
        runtime.close()


def test_an_adapter_of_a_tied_head_corrects_the_head_alone(tmp_path: Path) -> None:
    runtime = start(make_tiny_llama(tmp_path / "tied.gguf", **SIZES, tied=True))
    try:
        random = np.random.default_rng(0)
        a, b = random.normal(0, 1, (4, 72)), random.normal(0, 0.2, (320, 4))
        head = LoraTensor("output.weight", Op.MUL_MAT, a.astype(np.float32), b.astype(np.float32), 1.0)
        runtime.delta.insert(0, runtime.delta.prepare(Adapter("head", Path("x"), "0", "peft", (head,))))
        before = last_logits(runtime, [])
        # the head is linear in the adapter's scale, which nothing before it sees
        once, twice = last_logits(runtime, [(0, 1.0)]) - before, last_logits(runtime, [(0, 2.0)]) - before
        assert np.abs(once).max() > 0.1
        np.testing.assert_allclose(twice, 2 * once, atol=1e-4)
    finally:
        runtime.close()


def test_adapters_enter_and_leave_between_steps(runtime: Runtime) -> None:
    base = last_logits(runtime, [])
    runtime.delta.insert(0, runtime.delta.prepare(random_adapter(4)))
    first = last_logits(runtime, [(0, 1.0)])
    assert runtime.delta.nbytes(0) > 0
    runtime.delta.insert(0, runtime.delta.prepare(random_adapter(5)))
    assert not np.array_equal(last_logits(runtime, [(0, 1.0)]), first)
    runtime.delta.remove(0)
    assert runtime.delta.nbytes(0) == 0
    np.testing.assert_array_equal(last_logits(runtime, []), base)
    with pytest.raises(StepFailed, match="adapter 0 is not loaded"):
        last_logits(runtime, [(0, 1.0)])


def test_a_step_that_llama_cpp_splits_is_refused_and_the_next_one_is_right(runtime: Runtime) -> None:
    runtime.delta.insert(0, runtime.delta.prepare(random_adapter(6)))
    right = last_logits(runtime, [(0, 1.0)])
    native = runtime.delta.native
    code, complaint = _native.decode_rows(runtime.address, native, [5, 6], [0, 0], [1, 3], [[(0, 1.0)], []])
    assert code == 0
    assert "rows where the step has 2" in complaint
    runtime.clear(1)
    runtime.clear(3)
    np.testing.assert_array_equal(last_logits(runtime, [(0, 1.0)]), right)


def test_what_fits_no_target_is_refused_by_name(runtime: Runtime) -> None:
    def refused(tensor: LoraTensor, message: str) -> None:
        with pytest.raises(InvalidAdapterFile, match=message):
            runtime.delta.prepare(Adapter("odd", Path("x"), "0", "gguf", (tensor,)))

    def zeros(*shape: int) -> NDArray[np.float32]:
        return np.zeros(shape, np.float32)

    unknown = LoraTensor("blk.9.attn_q.weight", Op.MUL_MAT, zeros(4, 72), zeros(72, 4), 1.0)
    refused(unknown, r"adapter 'odd': .*no mul_mat with 'blk\.9\.attn_q\.weight'")
    wrong = LoraTensor("blk.0.attn_q.weight", Op.MUL_MAT, zeros(4, 64), zeros(72, 4), 1.0)
    refused(wrong, r"blk\.0\.attn_q\.weight: expected A \(rank, 72\) and B \(72, rank\)")
    norm = LoraTensor("output_norm.weight", Op.MUL_MAT, zeros(4, 72), zeros(72, 4), 1.0)
    refused(norm, r"no mul_mat with 'output_norm\.weight'")


def test_kernels_this_processor_lacks_are_an_error() -> None:
    with pytest.raises(ValueError, match="no kernels named 'mmx'"):
        DeltaPath(1, "mmx")


def test_values_beyond_the_range_of_f16_keep_their_meaning(tiny: Path) -> None:
    runtime = start(tiny)
    try:
        small, large = random_adapter(8), []
        for tensor in small.tensors:
            large.append(LoraTensor(tensor.target, tensor.op, tensor.a * 1e9, tensor.b * 1e-12, tensor.scale * 1e3))
        runtime.delta.insert(0, runtime.delta.prepare(small))
        runtime.delta.insert(1, runtime.delta.prepare(Adapter("l", Path("x"), "1", "peft", tuple(large))))
        assert distance(last_logits(runtime, [(1, 1.0)]), last_logits(runtime, [(0, 1.0)])) < 0.02
    finally:
        runtime.close()
