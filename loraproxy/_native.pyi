"""The native extension: the delta path and the engine's hot calls into llama.cpp."""

import numpy as np
from numpy.typing import NDArray

class Op:
    """The graph operation a target is."""

    mul_mat: Op
    get_rows: Op
    name: str

class Target:
    """One weight of the graph that adapters can correct."""

    name: str
    op: Op
    n_in: int
    n_out: int
    visits: int
    quantized: bool
    """In host memory and of a quantised type: adapters may be kept in 8 bits."""
    refusal: str

class AdapterWeights:
    """One adapter's pairs, each in f16 or in 8 bits."""

    nbytes: int

class WeightsBuilder:
    """Collects an adapter's pairs, each checked against its target's shape (ValueError)."""

    def __init__(self, delta: Delta, eight_bits: bool) -> None:
        """``eight_bits``: where the target is quantised and the matrix has no values far above the rest."""

    def add(self, target: int, a: NDArray[np.float32], b: NDArray[np.float32], scale: float) -> None: ...
    def finish(self) -> AdapterWeights: ...

class Delta:
    """The eval callback and its adapters; one engine thread owns it."""

    callback: int
    user_data: int
    targets: list[Target]
    kernel_name: str
    cuts: int
    own_products: int
    """Weights whose products are computed here instead of by llama.cpp."""

    def __init__(self, n_threads: int, kernels: str = "", own_products: bool = True) -> None: ...
    @staticmethod
    def has_kernels(name: str, /) -> bool: ...
    def watch_begin(self) -> None: ...
    def watch_end(self) -> None: ...
    def find_target(self, name: str, op: Op, /) -> int: ...
    def add_adapter(self, adapter_id: int, weights: AdapterWeights, /) -> None: ...
    def remove_adapter(self, adapter_id: int, /) -> None: ...
    def adapter_bytes(self, adapter_id: int, /) -> int: ...
    def begin_rows(self, sets: list[list[tuple[int, float]]], /) -> None:
        """The next graph has a row for each set. For graphs that are not llama.cpp's; the decode calls do it."""

    def begin_chunk(self, adapters: list[tuple[int, float]], n_rows: int, /) -> None:
        """The next graph has ``n_rows`` rows under one set."""

    def end(self) -> str:
        """The delta path's complaint about the graph that was computed, or ""."""

    def use_device_kernel(self) -> None:
        """From now on tensors in host memory are treated like those on a device: for comparing the two."""

def decode_rows(
    ctx: int,
    delta: Delta | None,
    tokens: list[int],
    positions: list[int],
    sequences: list[int],
    sets: list[list[tuple[int, float]]],
) -> tuple[int, str]:
    """One token each of several consecutive sequences: llama_decode's code and the delta path's complaint or ""."""

def decode_chunk(
    ctx: int,
    delta: Delta | None,
    tokens: list[int],
    first: int,
    sequence: int,
    last_logits: bool,
    set: list[tuple[int, float]],
) -> tuple[int, str]:
    """Tokens of one sequence from position ``first``: llama_decode's code and the delta path's complaint or ""."""

def base_product(type: int, weights: bytes, n_out: int, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The product of a quantised weight, as it lies in a GGUF file, with rows of x: (n_rows, n_out).

    Raises ValueError where this processor has no kernel for the type and the length.
    """

def logits(ctx: int, row: int, /) -> NDArray[np.float32]:
    """A copy of one row's logits, shape (n_vocab,)."""

def sequence_state(ctx: int, sequence: int, /) -> bytes:
    """The KV cells of one sequence."""

def restore_sequence(ctx: int, sequence: int, state: bytes, /) -> bool:
    """Put saved KV cells into an empty sequence."""

def sample_rows(ctx: int, rows: list[int], chains: list[int], grammars: list[int], n_threads: int, /) -> list[int]:
    """One token for each row; -1 where the chain selected none."""

def top_logprobs(ctx: int, row: int, chosen: int, n: int, /) -> tuple[float, list[tuple[int, float]]]:
    """Softmax of the raw logits: the chosen token's log-probability and the n best tokens."""

def sample_with_probs(
    ctx: int, row: int, chain: int, grammar: int, n: int, /
) -> tuple[int, float, list[tuple[int, float]]]:
    """One token, its probability after the chain, and up to n candidates with theirs."""
