"""Configuration: what a worker is told, and what the configuration file and the command line say."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    """A frozen model that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WorkerAdapter(Strict):
    """An adapter the worker loads: its id on the wire, its public name and where its file or folder is."""

    id: int = Field(ge=0)
    name: str
    path: Path


class WorkerSettings(Strict):
    """Everything the embedded worker process is told, as JSON, when it is started."""

    model: Path
    socket: Path
    """The unix socket to listen on; created with mode 0600."""
    alias: str = ""
    adapters: tuple[WorkerAdapter, ...] = ()
    parallel: int = Field(default=8, ge=1, le=256)
    """Slots: how many requests run in one batch."""
    ctx_size: int = Field(default=0, ge=0)
    """Tokens of context over all slots, as in llama-server; each slot has ctx_size / parallel. 0: the model's
    training context for each slot, within reason."""
    threads: int = Field(default=0, ge=0)
    """0: one per physical core."""
    threads_batch: int = Field(default=0, ge=0)
    batch_size: int = Field(default=2048, ge=1)
    ubatch_size: int = Field(default=512, ge=1)
    prompt_chunk: int = Field(default=64, ge=1)
    """Tokens per prompt decode; prompts are cut at multiples of it, whatever else runs."""
    gpu_layers: int = 0
    cache_ram_mib: int = Field(default=512, ge=0)
    """Memory for the prompt cache; 0 disables it."""
    use_mmap: bool = True
    use_extra_bufts: bool = False
    """Let llama.cpp repack weights into its own layouts: no page sharing, and AMX crashes on some machines."""
