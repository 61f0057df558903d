"""What can be configured: what a worker is told, and what the configuration file and the command line say.

:mod:`loraproxy.config_file` reads the file and explains what is wrong with it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)


class Strict(BaseModel):
    """A frozen model that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WorkerAdapter(Strict):
    """An adapter the worker loads: its id on the wire, its public name and where its file or folder is."""

    id: int = Field(ge=0)
    name: str
    path: Path
    digest: str = ""
    """Load this content and no other; empty: whatever is there."""
    ignore_unsupported: bool = False
    """Leave out what cannot be applied instead of refusing the adapter."""


class WorkerSetMember(WorkerAdapter):
    """An adapter of the one set that a graph worker runs, and its scale there."""

    scale: float = Field(allow_inf_nan=False)


class WorkerSet(Strict):
    """What a graph worker is told to run; empty: the base model."""

    adapters: tuple[WorkerSetMember, ...] = ()


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
    """0: one for each CPU this process may use."""
    threads_batch: int = Field(default=0, ge=0)
    batch_size: int = Field(default=2048, ge=1)
    ubatch_size: int = Field(default=512, ge=1)
    prompt_chunk: int = Field(default=32, ge=1)
    """Tokens per prompt decode; prompts are cut at multiples of it, whatever else runs."""
    prompt_budget: int = Field(default=64, ge=1)
    """Prompt tokens decoded between two steps of the running sequences, one chunk of each prompt at most."""
    gpu_layers: int = 0
    cache_ram_mib: int = Field(default=512, ge=0)
    """Memory for the prompt cache; 0 disables it."""
    use_mmap: bool = True
    use_extra_bufts: bool = False
    """Let llama.cpp repack weights into its own layouts: no page sharing, and AMX crashes on some machines."""
    fast_products: bool = True
    """Compute the products of quantised weights in host memory for all rows of a step at once."""
    parent: int = 0
    """The process that starts the worker, with which it ends; 0: whichever its parent is."""
    adapter_type: Literal["auto", "f16"] = "auto"
    """How adapters' weights are kept; auto: in 8 bits where the base weight is quantised itself, else in f16."""
    lora_mode: Literal["delta", "graph"] = "delta"
    """``graph``: adapters through llama.cpp's own LoRA graph, one set at a time, for what the delta path cannot do."""

    @model_validator(mode="after")
    def _check_adapters(self) -> WorkerSettings:
        if self.lora_mode == "graph" and self.adapters:
            raise ValueError("a graph worker starts with the base model; it is told its adapter set later")
        return self


class ConfigError(ValueError):
    """A configuration that cannot be used; a line for each fault says where it is and what would be right."""


_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|)\s*")
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B|)\s*", re.IGNORECASE)


def parse_duration(value: object) -> float:
    """Seconds from a number of seconds or from text such as ``500ms``, ``30s``, ``2m``. Raises ValueError."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and (match := _DURATION.fullmatch(value)):
        return float(match[1]) * _DURATION_UNITS[match[2]]
    raise ValueError("should be a duration such as 30, 30s or 2m")


def parse_size(value: object) -> int:
    """Bytes from a number of bytes or from text such as ``32MiB`` or ``1G`` (powers of 1024). Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))
    raise ValueError("should be a size such as 1048576, 512KiB or 32MiB")


def parse_layers(value: object) -> object:
    """llama-server's ``-ngl``: a count, or ``all`` and ``auto``, which llama.cpp knows as -1."""
    return -1 if value in ("all", "auto") else value


_NUMBER_OR_TEXT = WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}]})
Duration = Annotated[float, BeforeValidator(parse_duration), _NUMBER_OR_TEXT]
Size = Annotated[int, BeforeValidator(parse_size), _NUMBER_OR_TEXT]
Layers = Annotated[
    int, BeforeValidator(parse_layers), WithJsonSchema({"anyOf": [{"type": "integer"}, {"enum": ["all", "auto"]}]})
]


def _or_path(schema: dict[str, Any]) -> None:
    long_form = dict(schema)
    schema.clear()
    schema["anyOf"] = [{"type": "string", "format": "path"}, long_form]


class AdapterConfig(Strict):
    """One adapter: a GGUF adapter file or a PEFT folder, and the scale it has in requests that name no adapter."""

    model_config = ConfigDict(json_schema_extra=_or_path)

    path: Path = Field(description="A GGUF adapter or a PEFT folder; relative to the configuration file.")
    scale: float = Field(
        default=0.0,
        allow_inf_nan=False,
        description="Scale in requests that name no adapter; 0 leaves them with the base model.",
    )
    description: str = Field(default="", max_length=4096, description="Shown in GET /adapters.")

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: object) -> object:
        return {"path": value} if isinstance(value, (str, Path)) else value


class CorsConfig(Strict):
    """What browsers may do, under llama-server's names and with its defaults (``--cors-*``)."""

    origins: str = Field(default="*", description="`*`, `localhost`, or the value of Access-Control-Allow-Origin.")
    methods: str = "GET, POST, DELETE, OPTIONS"
    headers: str = "*"
    credentials: bool = True


class HttpConfig(Strict):
    """The public HTTP server."""

    host: str = Field(default="127.0.0.1", min_length=1, description="An address, or a path ending in .sock.")
    port: int = Field(default=8080, ge=0, le=65535, description="0 takes a free port.")
    api_keys: tuple[str, ...] = Field(default=(), description="Any of these opens the API; none: no key is asked for.")
    api_key_file: Path | None = Field(default=None, description="One key a line; lines starting with # are comments.")
    cors: CorsConfig = CorsConfig()
    max_body: Size = Field(default=32 * 1024**2, ge=1024, le=32 * 1024**2, description="The largest request body.")
    max_queue: int = Field(
        default=256, ge=0, description="Requests that may wait beyond those that run; more are answered 503."
    )
    drain_timeout: Duration = Field(
        default=30.0, ge=0, le=3600, description="How long SIGTERM lets requests in flight run to their end."
    )

    @property
    def address(self) -> str:
        """Where it listens, as text."""
        return f"{self.host}:{self.port}"


class EngineConfig(Strict):
    """The embedded worker's engine; the defaults are for CPUs."""

    parallel: int = Field(default=8, ge=1, le=256, description="Slots: how many requests run in one batch.")
    ctx_size: int = Field(
        default=0,
        ge=0,
        description="Tokens of context over all slots. 0: the model's own for each slot, 4096 at most.",
    )
    threads: int = Field(default=0, ge=0, le=1024, description="0: one for each CPU it may use.")
    threads_batch: int = Field(
        default=0, ge=0, le=1024, description="Overrides threads, as prompts and steps share one pool. 0: as threads."
    )
    batch_size: int = Field(default=2048, ge=1, le=1_048_576)
    ubatch_size: int = Field(default=512, ge=1, le=1_048_576)
    prompt_chunk: int = Field(
        default=32,
        ge=1,
        le=1_048_576,
        description="Prompt tokens decoded at once, between two steps of the running requests; prompts are cached up"
        " to a multiple of it. Larger is faster on a GPU.",
    )
    gpu_layers: Layers = Field(default=0, ge=-1, description="Layers on the GPU; -1, `all`: all of them.")
    cache_ram: Size = Field(default=512 * 1024**2, ge=0, description="Memory for the prompt cache; 0 disables it.")
    mmap: bool = Field(default=True, description="Map the model file, so that processes share its pages.")
    lora_mode: Literal["delta", "graph"] = Field(
        default="delta",
        description="delta: any adapter sets in one batch. graph: llama.cpp's own LoRA graph, for adapters of MoE"
        " experts and recurrent models; one adapter set a worker, as many workers as `pool` allows.",
    )
    fast_products: bool = Field(
        default=True,
        description="Multiply quantised weights with all rows of a step at once, by kernels of ours, where there is one"
        " for their type and this processor; false: llama.cpp's own products.",
    )
    adapter_type: Literal["auto", "f16"] = Field(
        default="auto",
        description="How loaded adapters are kept. auto: in 8 bits where the base's weight is quantised itself, which"
        " halves their memory and what a step reads; f16: always in f16.",
    )
    repack: bool = Field(
        default=False,
        description="Let llama.cpp copy weights into its own layouts: no shared pages; crashes on some machines.",
    )


class BackendConfig(Strict):
    """What generates: the embedded worker; llama-servers, started here or running somewhere; or an Ollama server."""

    kind: Literal["embedded", "llama-server", "ollama"] = "embedded"
    urls: tuple[str, ...] = Field(
        default=(),
        description="llama-servers that run already, or the Ollama server (default: http://127.0.0.1:11434).",
    )
    bin: Path | None = Field(default=None, description="A llama-server to start; a bare name: on the PATH.")
    args: tuple[str, ...] = Field(default=(), description="More arguments for the llama-server that is started.")
    api_key: str = Field(default="", description="The key that the llama-servers at `urls` ask for.")

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
                raise ValueError(f"{url!r} should be a URL such as http://127.0.0.1:8081")
        return tuple(dict.fromkeys(url.rstrip("/") for url in urls))

    @model_validator(mode="after")
    def _is_one(self) -> BackendConfig:
        if self.kind == "ollama" and (self.bin or self.args or self.api_key):
            raise ValueError(
                "bin, args and api_key are for llama-server; ollama takes its url alone (--backend-url URL)"
            )
        if self.kind == "ollama" and len(self.urls) > 1:
            raise ValueError("ollama takes one url, not several")
        if self.kind == "embedded" and self.urls and not (self.bin or self.args or self.api_key):
            raise ValueError(
                "urls need `kind: llama-server` or `kind: ollama` (--backend llama-server, --backend ollama)"
            )
        if self.kind == "embedded" and (self.urls or self.bin or self.args or self.api_key):
            raise ValueError("urls, bin, args and api_key need `kind: llama-server` (--backend llama-server)")
        if self.kind == "llama-server" and bool(self.urls) == bool(self.bin):
            raise ValueError("llama-server needs either urls (--backend-url URL) or bin (--backend-bin PATH)")
        if self.urls and self.args:
            raise ValueError("args are for a llama-server that is started; one at a URL runs already")
        return self


class PoolConfig(Strict):
    """Workers that run one adapter set at a time: how many there are, and how long they stay."""

    max_workers: int = Field(default=4, ge=1, le=256, description="Workers that run at once.")
    memory_budget: Size = Field(
        default=0,
        ge=0,
        description="Memory for all workers, by estimate, the base model's file counted once. 0: no limit.",
    )
    idle_timeout: Duration = Field(
        default=300.0,
        ge=0,
        description="A worker that nobody uses for so long ends, the last one excepted. 0: they stay.",
    )
    preload: tuple[str, ...] = Field(
        default=(),
        description="Adapters that are loaded before the first request, and where workers run one set each have one at"
        " all times; `base` is the base model.",
    )


class LogConfig(Strict):
    """What is written to stderr. API keys, prompts and answers never are."""

    format: Literal["text", "json"] = Field(default="text", description="Lines of text, or a JSON object a line.")
    level: Literal["debug", "info", "warning", "error"] = "info"
    requests: bool = Field(default=False, description="A line for every finished request; also with level `debug`.")


class Config(Strict):
    """The configuration file of ``loraproxy serve``; the command line overrides it."""

    model: Path | None = Field(
        default=None, description="The base model, a GGUF file; with the backend ollama its name there."
    )
    alias: str = Field(default="", description="The base model's public name; several separated by commas.")
    adapters: dict[str, AdapterConfig] = Field(
        default_factory=dict,
        description="Name: path, or name: {path, scale, description}. Ids on the wire follow this order.",
    )
    adapters_dir: Path | None = Field(
        default=None,
        description="Every adapter in this folder, by its file's name; watched for what comes, changes and goes.",
    )
    adapter_roots: tuple[Path, ...] = Field(
        default=(), description="Folders from which the API may register adapters by path, beside adapters_dir."
    )
    upload_dir: Path | None = Field(
        default=None,
        description="Where adapters uploaded through the API are kept; no two servers may share it. Default: a folder"
        " for this base model and this address in $XDG_DATA_HOME/loraproxy (~/.local/share/loraproxy).",
    )
    max_adapter_size: Size = Field(default=2 * 1024**3, ge=1024, description="The largest adapter that is uploaded.")
    adapter_memory: Size = Field(
        default=1024**3,
        ge=0,
        description="Memory for loaded adapters; the least recently used leave when it is full. 0: no limit.",
    )
    ignore_unsupported: bool = Field(
        default=False, description="Apply the rest of an adapter that has unsupported parts, instead of refusing it."
    )
    strict_models: bool = Field(default=False, description="Refuse requests whose `model` is neither base nor adapter.")
    http: HttpConfig = HttpConfig()
    log: LogConfig = LogConfig()
    backend: BackendConfig = BackendConfig()
    pool: PoolConfig = PoolConfig()
    engine: EngineConfig = EngineConfig()

    @property
    def aliases(self) -> tuple[str, ...]:
        """The public names given with ``alias``, first the one that answers carry."""
        return tuple(a for a in (part.strip() for part in self.alias.split(",")) if a)

    def relative_to(self, folder: Path) -> Config:
        """The same with paths taken relative to ``folder`` (and ``~`` expanded)."""

        def at(path: Path | None) -> Path | None:
            return None if path is None else folder / path.expanduser()

        adapters = {
            name: adapter.model_copy(update={"path": at(adapter.path)}) for name, adapter in self.adapters.items()
        }
        program = self.backend.bin
        if program is not None and len(program.parts) > 1:  # a bare name is looked for on the PATH
            program = at(program)
        http = self.http.model_copy(update={"api_key_file": at(self.http.api_key_file)})
        return self.model_copy(
            update={
                "model": self.model if self.backend.kind == "ollama" else at(self.model),
                "adapters": adapters,
                "adapters_dir": at(self.adapters_dir),
                "adapter_roots": tuple(folder / root.expanduser() for root in self.adapter_roots),
                "upload_dir": at(self.upload_dir),
                "http": http,
                "backend": self.backend.model_copy(update={"bin": program}),
            }
        )
