"""One llama.cpp context with the delta path, or with llama.cpp's own LoRA graph: the only module that decodes.

It keeps the rules that make a request's result independent of what else runs (bit for bit on the CPU):
the KV cache is split by sequence; a prompt chunk is a decode of its own; a step holds one token of each
running sequence, whose ids are consecutive, so that every ``llama_decode`` is one ubatch.
"""

from __future__ import annotations

import ctypes
import logging
import os

import llama_cpp
import numpy as np

from loraproxy import _native
from loraproxy.config import WorkerSettings
from loraproxy.worker.delta import DeltaPath, NativeSet
from loraproxy.worker.graph_lora import GraphLora
from loraproxy.worker.model import Model, ModelLoadError

log = logging.getLogger("loraproxy.engine")

KV_PAD = 256
"""llama.cpp rounds the cells that attention reads up to a multiple of this."""

MAX_DEFAULT_CTX = 4096
"""Tokens of context for each slot when none is asked for and the model was trained with more."""


class StepFailed(RuntimeError):
    """A decode failed or surprised the delta path: its results must not be used."""


def usable_cpus() -> int:
    """CPUs this process may use; each hyper-thread counts as one."""
    try:
        return max(len(os.sched_getaffinity(0)), 1)
    except AttributeError:  # macOS
        return os.cpu_count() or 1


class Runtime:
    """A model, one context with ``n_slots`` sequences, and its adapters: on the delta path, or one set in ``graph``.

    A graph worker's delta path only tells which weights the graph multiplies.
    """

    def __init__(self, model: Model, settings: WorkerSettings, *, kernels: str = "") -> None:
        """Make the context and watch one decode to learn the graph. Raises ModelLoadError.

        ``kernels``: the delta path's, as in DeltaPath.
        """
        self.model = model
        self.n_slots = settings.parallel
        self.threads = settings.threads or usable_cpus()
        self.threads_batch = settings.threads_batch or self.threads
        per_slot = settings.ctx_size // self.n_slots if settings.ctx_size else min(model.n_ctx_train, MAX_DEFAULT_CTX)
        if per_slot > model.n_ctx_train > 0:  # as llama-server does
            log.warning("event=ctx_capped asked=%d trained=%d", per_slot, model.n_ctx_train)
            per_slot = model.n_ctx_train
        in_graph = settings.lora_mode == "graph"
        self.delta = DeltaPath(
            self.threads_batch,
            kernels,
            own_products=settings.fast_products and not in_graph,
            eight_bits=settings.adapter_type == "auto",
        )
        self.prompt_chunk = min(settings.prompt_chunk, settings.ubatch_size, settings.batch_size, max(per_slot, 1))
        self.context = self._make_context(settings, max(per_slot, 1))
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.address: int = ctypes.cast(self.context, ctypes.c_void_p).value or 0
        self.n_ctx_slot: int = llama_cpp.llama_n_ctx_seq(self.context)
        self._watch()
        self.graph = GraphLora(model, self.context, self.delta, settings.socket.parent) if in_graph else None
        self._native = None if in_graph else self.delta.native

    @property
    def rewinds(self) -> bool:
        """Whether a sequence can be truncated: the state of a recurrent model only goes forward."""
        return not self.model.recurrent

    def _make_context(self, settings: WorkerSettings, per_slot: int) -> llama_cpp.llama_context_p:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = per_slot * self.n_slots
        # no decode is larger than a prompt chunk or a step: compute buffers for more would lie idle
        params.n_batch = params.n_ubatch = max(self.prompt_chunk, self.n_slots, 2)
        params.n_seq_max = self.n_slots
        params.n_outputs_max = self.n_slots
        # the delta path's kernels and ggml share one pool of threads, whose size must not change: one number for both
        params.n_threads = self.threads_batch
        params.n_threads_batch = self.threads_batch
        params.kv_unified = False
        params.swa_full = True
        params.op_offload = False
        params.no_perf = True
        params.cb_eval = ctypes.cast(ctypes.c_void_p(self.delta.callback), llama_cpp.ggml_backend_sched_eval_callback)
        params.cb_eval_user_data = self.delta.user_data
        context = llama_cpp.llama_init_from_model(self.model.handle, params)
        if not context:
            raise ModelLoadError(
                f"{self.model.path}: no context of {params.n_ctx} tokens ({self.n_slots} slots x {per_slot}) can be"
                " made; is there enough memory? (--ctx-size and --parallel set its size)"
            )
        return context

    def _watch(self) -> None:
        token = self.model.bos if self.model.bos >= 0 else 0
        self.delta.native.watch_begin()
        code, _ = _native.decode_chunk(self.address, self.delta.native, [token, token], 0, 0, True, [])
        self.delta.native.watch_end()
        self.clear(0)
        if code != 0:
            raise ModelLoadError(f"{self.model.path}: the warm-up decode failed with code {code}")

    # -- sequences -----------------------------------------------------------------------------------------

    def clear(self, sequence: int) -> None:
        """Empty one sequence; the next tokens start at its first cell."""
        llama_cpp.llama_memory_seq_rm(self.memory, sequence, -1, -1)

    def truncate(self, sequence: int, length: int) -> None:
        """Keep the first ``length`` positions of a sequence."""
        llama_cpp.llama_memory_seq_rm(self.memory, sequence, length, -1)

    def save(self, sequence: int) -> bytes:
        """The sequence's KV cells."""
        return _native.sequence_state(self.address, sequence)

    def restore(self, sequence: int, state: bytes) -> None:
        """Put saved cells into ``sequence``, whatever it held."""
        self.clear(sequence)
        if not _native.restore_sequence(self.address, sequence, state):
            self.clear(sequence)
            raise StepFailed("saved KV cells could not be restored")

    # -- decodes -------------------------------------------------------------------------------------------

    def prefill(self, sequence: int, tokens: list[int], first: int, adapters: NativeSet, last_logits: bool) -> None:
        """Decode one prompt chunk: ``tokens`` at positions ``first``... of ``sequence``.

        Raises StepFailed; ValueError for more than ``prompt_chunk`` tokens, on which llama.cpp would abort.
        """
        if len(tokens) > self.prompt_chunk:
            raise ValueError(f"{len(tokens)} tokens are more than a chunk of {self.prompt_chunk}")
        self._check(*_native.decode_chunk(self.address, self._native, tokens, first, sequence, last_logits, adapters))

    def step(self, tokens: list[int], positions: list[int], first_sequence: int, adapters: list[NativeSet]) -> None:
        """Decode one token of each of the sequences ``first_sequence``...; all give logits. Raises StepFailed."""
        self.step_of(tokens, positions, list(range(first_sequence, first_sequence + len(tokens))), adapters)

    def step_of(self, tokens: list[int], positions: list[int], sequences: list[int], adapters: list[NativeSet]) -> None:
        """As :meth:`step`, of any sequences; on the delta path their ids must be consecutive."""
        self._check(*_native.decode_rows(self.address, self._native, tokens, positions, sequences, adapters))

    def is_finite(self, row: int) -> bool:
        """Whether every logit of a row of the last decode is a finite number: else no sampler may see it.

        An adapter's scale or weights can be so large that activations overflow. Sorting by what is not a number
        is undefined in C++.
        """
        pointer = llama_cpp.llama_get_logits_ith(self.context, row)
        logits = np.ctypeslib.as_array(pointer, (self.model.n_vocab,))
        with np.errstate(over="ignore", invalid="ignore"):
            return bool(np.isfinite(logits.sum()) or np.isfinite(logits).all())

    def needs_company(self, position: int) -> bool:
        """Whether a lone sequence at ``position`` must be decoded beside an idle one.

        For one row of one sequence over 512 cells or more ggml's attention splits the cells between threads
        (``flash_attn_ext``), and sums in another order than for several sequences. With company there is one
        order only.
        """
        return self.rewinds and self.n_slots > 1 and position + 1 > KV_PAD

    def _check(self, code: int, complaint: str) -> None:
        if code != 0:
            raise StepFailed(f"llama_decode failed with code {code}")
        if complaint:
            raise StepFailed(f"the delta path refused the step: {complaint}")

    def close(self) -> None:
        """Free the context and the model."""
        if self.context:
            llama_cpp.llama_free(self.context)
            self.context = None
        if self.graph is not None:
            self.graph.close()
        self.model.close()
