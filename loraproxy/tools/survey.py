"""What an adapter's files say by themselves, without a base model, and everything that is wrong with them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loraproxy.adapters.base_model import TOKEN_EMBD
from loraproxy.adapters.checks import MAX_FILE_BYTES, MAX_RANK, Refused, check_rank, check_scale, listed
from loraproxy.adapters.decode import Buffer, all_finite, decode
from loraproxy.adapters.files import CheckedFile, opened, read_file
from loraproxy.adapters.gguf_header import GgufArray, GgufError, GgufHeader, HeaderGoesOn, read_gguf_header
from loraproxy.adapters.peft_config import CONVERTED, PeftConfig
from loraproxy.adapters.peft_folder import CONFIG_FILE, WEIGHTS_FILE, what_is_missing
from loraproxy.adapters.peft_names import PeftTensors, sort_tensors
from loraproxy.adapters.safetensors_header import read_safetensors_header
from loraproxy.adapters.stored import StoredTensor
from loraproxy.adapters.tensors import pair_resident_bytes
from loraproxy.tools.files import exists

_MAX_CONFIG = 1 << 20
_MAX_KEYS = 256
_FIRST_LOOK = 128 * 1024
_FAULTS = (Refused, GgufError, OSError, MemoryError)


@dataclass(frozen=True)
class Module:
    """One adapted module or tensor, as the file names it. shape: (rank, n_in, n_out), None if A and B do not match."""

    name: str
    a: StoredTensor
    b: StoredTensor
    shape: tuple[int, int, int] | None
    alpha: float
    scale: float
    a_by_token: bool = False


@dataclass
class Survey:
    """An adapter as its files have it. digest: "" if they could not be read whole."""

    path: Path
    format: str
    digest: str = ""
    size_bytes: int = 0
    architecture: str = ""
    base_name: str = ""
    rslora: bool = False
    modules: list[Module] = field(default_factory=list)
    invocation_tokens: tuple[int, ...] = ()
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    config: bytes = b""
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)

    @property
    def resident_bytes(self) -> int:
        """About what it takes in the engine's memory; exact but for modules that the base model fuses or splits."""
        return sum(pair_resident_bytes(*module.shape) for module in self.modules if module.shape)

    @property
    def types(self) -> list[str]:
        """The types of its weights, the most frequent first."""
        kinds = [tensor.type for module in self.modules for tensor in (module.a, module.b)]
        return [kind.name for kind in sorted(set(kinds), key=lambda kind: (-kinds.count(kind), kind))]

    def problem(self, reason: object) -> None:
        """Note a reason for which the adapter would be refused, once."""
        text = str(reason) or type(reason).__name__
        if isinstance(reason, OSError):
            text = reason.strerror or text
        if isinstance(reason, MemoryError):
            text = "there is not enough memory to read it"
        if text not in self.problems:
            self.problems.append(text)

    def attempt(self, work: Callable[[], Any]) -> Any:
        """The result of ``work``; None if the file is at fault, whose reason becomes a problem."""
        try:
            return work()
        except _FAULTS as reason:
            self.problem(reason)
            return None


def survey_gguf(path: Path) -> Survey:
    """Read a GGUF adapter. Raises nothing: what is wrong is among its problems."""
    found = Survey(path, "gguf")

    def read() -> None:
        with opened(path, MAX_FILE_BYTES) as file:
            found.size_bytes = file.size
            header = gguf_header(file)
            found.tensors = header.tensors
            _gguf_metadata(found, header)
            _gguf_pairs(found, header)
            _content(found, file, hashlib.sha256())

    found.attempt(read)
    return found


def gguf_header(file: CheckedFile) -> GgufHeader:
    """The header of a GGUF file of any kind, of which no more is read. Raises GgufError and Refused."""
    n_bytes = _FIRST_LOOK
    while True:
        try:
            return read_gguf_header(file.head(n_bytes), file.size)
        except HeaderGoesOn:
            n_bytes *= 4


def _gguf_metadata(found: Survey, header: GgufHeader) -> None:
    found.architecture = found.attempt(lambda: header.text("general.architecture")) or ""
    kind = found.attempt(lambda: header.text("adapter.type"))
    if kind not in ("lora", None):
        found.problem(f"adapter.type is {kind!r}; only 'lora' is supported")
    name = header.metadata.get("general.base_model.0.name")
    found.base_name = name[:256] if isinstance(name, str) else ""
    tokens = header.metadata.get("adapter.alora.invocation_tokens")
    if isinstance(tokens, GgufArray) and tokens.count:
        found.invocation_tokens = tuple(int(token) for token in tokens.values)
        found.problem(_ALORA)


_ALORA = "activated LoRA (it starts at its invocation tokens, in the middle of a prompt) is not supported"


def _gguf_pairs(found: Survey, header: GgufHeader) -> None:
    alpha = header.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, float) or not math.isfinite(alpha):
        found.problem("adapter.lora.alpha must be a finite float32 number")
        alpha = 0.0
    halves: dict[str, dict[str, StoredTensor]] = {}
    strange = []
    for name, tensor in header.tensors.items():
        target, _, suffix = name.rpartition(".")
        if suffix in ("lora_a", "lora_b"):
            halves.setdefault(target, {})[suffix] = tensor
        elif name.endswith("_norm.weight"):
            found.notes.append(f"ignored as llama.cpp ignores it: {name}")
        else:
            strange.append(name)
    if strange:
        found.problem(f"tensors that are neither lora_a nor lora_b, and so no plain LoRA ({listed(strange)})")
    _whole(found, {name: {key[-1].upper(): half for key, half in both.items()} for name, both in halves.items()})
    for target, both in halves.items():
        if len(both) == 2:
            a, b = both["lora_a"], both["lora_b"]
            by_token = target == TOKEN_EMBD
            rank = max(b.shape[-1], 1)
            scale = alpha / rank if alpha else 1.0
            _add(found, target, a, b, alpha, scale, by_token)


def _whole(found: Survey, modules: Mapping[str, Mapping[str, StoredTensor]]) -> None:
    missing = [f"{name}.lora_{half}" for name, halves in modules.items() for half in "AB" if half not in halves]
    if missing:
        found.problem(f"half of a pair is missing: {listed(missing)}; save the adapter again")
    if not modules:
        found.problem("the file holds no lora_A/lora_B tensors")


def _add(
    found: Survey, name: str, a: StoredTensor, b: StoredTensor, alpha: float, scale: float, a_by_token: bool
) -> None:
    rank_and_in = a.shape[::-1] if a_by_token else a.shape
    shape = None
    if len(a.shape) == len(b.shape) == 3 and (a.shape[0], a.shape[1]) == (b.shape[0], b.shape[2]):
        found.attempt(lambda: check_rank(name, b.shape[2]))  # of experts: each has a pair of its own
    elif len(a.shape) != 2 or len(b.shape) != 2 or rank_and_in[0] != b.shape[1]:
        found.problem(f"{name}: A {a.shape} and B {b.shape} are no low-rank pair")
    else:
        found.attempt(lambda: check_rank(name, b.shape[1]))
        if 1 <= b.shape[1] <= MAX_RANK:
            shape = (b.shape[1], rank_and_in[1], b.shape[0])
    if not math.isnan(scale):  # else the configuration says nothing that can be read, which is a problem already
        found.attempt(lambda: check_scale(name, scale))
    found.modules.append(Module(name, a, b, shape, alpha, scale, a_by_token))


def survey_peft(path: Path) -> Survey:
    """Read a PEFT folder. Raises nothing: what is wrong is among its problems."""
    found = Survey(path, "peft")
    settings = None
    if missing := what_is_missing(path):
        found.problem(missing)
    if exists(path / CONFIG_FILE):
        found.config = found.attempt(lambda: read_file(path / CONFIG_FILE, _MAX_CONFIG)) or b""
        settings = _settings(found, found.config) if found.config else None
    if not exists(path / WEIGHTS_FILE):
        return found

    def read() -> None:
        digest = hashlib.sha256(len(found.config).to_bytes(8, "little"))
        digest.update(found.config)
        with opened(path / WEIGHTS_FILE, MAX_FILE_BYTES) as file:
            found.size_bytes = len(found.config) + file.size
            found.tensors = read_safetensors_header(file)
            _peft_modules(found, sort_tensors(found.tensors), settings)
            _content(found, file, digest)

    found.attempt(read)
    return found


def _settings(found: Survey, raw: bytes) -> PeftConfig | None:
    """The configuration; where it is refused, every key's own problem is noted and the rest used."""
    try:
        settings: PeftConfig | None = PeftConfig.parse(raw)
    except Refused as reason:
        found.problem(reason)
        settings = _usable_part(found, raw)
    if settings is not None:
        found.base_name, found.rslora = settings.base_name, settings.rslora
        found.invocation_tokens = settings.invocation_tokens
        if settings.activated:
            found.problem(_ALORA)
        for why in settings.unsupported:
            found.problem(why)
        if settings.needs_changed_base:
            found.problem(f"{settings.needs_changed_base}: {CONVERTED}")
        found.notes.extend(settings.init_notes)
    return settings


def _usable_part(found: Survey, raw: bytes) -> PeftConfig | None:
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(config, dict):
        return None
    usable: dict[str, Any] = {}
    for key, value in list(config.items())[:_MAX_KEYS]:
        trial = json.dumps({"peft_type": "LORA", "lora_alpha": 1, key: value}).encode()
        try:
            PeftConfig.parse(trial)
            usable[key] = value
        except Refused as reason:
            found.problem(reason)
    try:
        settings = PeftConfig.parse(json.dumps({"peft_type": "LORA", "lora_alpha": 1, **usable}).encode())
    except Refused:
        return None
    return settings if "lora_alpha" in usable else replace(settings, alpha=math.nan)


def _peft_modules(found: Survey, tensors: PeftTensors, settings: PeftConfig | None) -> None:
    for why, names in tensors.strange.items():
        if why in found.problems:
            found.problems.remove(why)
        found.problem(f"{why} ({listed(names)})")
    _whole(found, {name: module.halves for name, module in tensors.modules.items()})
    if settings is not None and not _affordable(found, settings, tensors.modules):
        settings = None
    chosen = [name for name in tensors.modules if settings is None or settings.layers.has(name)]
    if skipped := tensors.modules.keys() - chosen:
        found.notes.append(f"not applied, being of layers that layers_to_transform does not name: {listed(skipped)}")
        if not chosen:
            found.problem("the adapter has no lora_A/lora_B tensors that can be applied")
    for name in chosen:
        module = tensors.modules[name]
        if len(module.halves) == 2:
            alpha = settings.alpha_of(name) if settings else math.nan
            scale = settings.scale(alpha, module.rank) if settings else math.nan
            _add(found, name, module.halves["A"], module.halves["B"], alpha, scale, False)


def _affordable(found: Survey, settings: PeftConfig, modules: Collection[str]) -> bool:
    """True if the patterns can be matched with all modules in reasonable time."""
    try:
        settings.alphas.check_cost(modules)
        settings.ranks.check_cost(modules)
    except Refused as reason:
        found.problem(reason)
        return False
    return True


def _content(found: Survey, file: CheckedFile, digest: Any) -> None:
    """Hash the whole file and look for values that are no numbers."""
    data = file.load(digest)
    found.digest = digest.hexdigest()
    damaged = [name for name, tensor in _weights(found.modules) if not _is_finite(found, data, tensor)]
    if damaged:
        found.problem(f"NaN or infinite weights: {listed(damaged)}; the adapter is damaged")


def _weights(modules: Iterable[Module]) -> Iterable[tuple[str, StoredTensor]]:
    return ((half.name, half) for module in modules for half in (module.a, module.b))


def _is_finite(found: Survey, data: Buffer, tensor: StoredTensor) -> bool:
    values = found.attempt(lambda: decode(data, tensor))
    return values is None or all_finite(values)
