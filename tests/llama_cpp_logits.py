"""llama.cpp's own logits, with an adapter file applied by its own LoRA graph."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray

PROMPT = [1, 290, 40, 300, 41, 263, 99, 310]


def logits(model_path: Path, adapter_path: Path | None = None, scale: float = 1.0) -> NDArray[np.float32]:
    """After each token of PROMPT, (len(PROMPT), n_vocab)."""
    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model_params.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(str(model_path).encode(), model_params)
    assert model
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = 64
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32  # f16 would round what is compared
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(len(PROMPT), 0, 1)
    try:
        if adapter_path is not None:
            adapter = llama_cpp.llama_adapter_lora_init(model, str(adapter_path).encode())
            assert adapter, "llama.cpp refused the adapter"
            adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
            assert llama_cpp.llama_set_adapters_lora(context, adapters, 1, (ctypes.c_float * 1)(scale)) == 0
        batch.n_tokens = len(PROMPT)
        for i, token in enumerate(PROMPT):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
            batch.seq_id[i][0] = 0
        assert llama_cpp.llama_decode(context, batch) == 0
        return np.array([llama_cpp.llama_get_logits_ith(context, i)[:320] for i in range(len(PROMPT))], np.float32)
    finally:
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)


def divergence(left: NDArray[np.float32], right: NDArray[np.float32]) -> float:
    """The largest Kullback-Leibler divergence of the distributions that two arrays of logits (..., n_vocab) mean."""
    p, q = (np.float64(x) - np.float64(x).max(axis=-1, keepdims=True) for x in (left, right))
    p, q = (x - np.log(np.exp(x).sum(axis=-1, keepdims=True)) for x in (p, q))
    return float((np.exp(p) * (p - q)).sum(axis=-1).max())
