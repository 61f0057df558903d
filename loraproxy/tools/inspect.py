"""``loraproxy inspect``: what a file or folder is, what it targets, and what would be refused and why."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf.constants import LlamaFileType

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.checks import Refused
from loraproxy.adapters.files import opened
from loraproxy.adapters.gguf_header import GgufError, GgufHeader
from loraproxy.adapters.peft_folder import CONFIG_FILE, WEIGHTS_FILE
from loraproxy.adapters.tensors import AdapterSummary
from loraproxy.errors import InvalidRequest
from loraproxy.tools.describe import alike, grouped_targets, scale_line, spread
from loraproxy.tools.files import exists, megabytes, printable
from loraproxy.tools.fit import Fit, fit
from loraproxy.tools.survey import Survey, gguf_header, survey_gguf, survey_peft

DESCRIPTION = "Say what a file or folder is, what it targets, and, with --model, whether it fits a base model."
_NO_SUCH_FILE = 2
_MAX_BYTES = 1 << 50


@dataclass
class Report:
    """What ``--json`` prints.

    kind: ``GGUF LoRA adapter``, ``PEFT LoRA adapter``, ``base model``, ``no adapter`` (a GGUF file or a folder of
    another kind, or anything else). usable: False if it would be refused, for the reasons in ``problems``. facts:
    what is known of a file of that kind, sizes in bytes.
    """

    path: str
    kind: str
    usable: bool = True
    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``loraproxy inspect``."""
    parser.add_argument("path", type=Path, metavar="PATH", help="a GGUF file or a PEFT folder")
    parser.add_argument("--model", "-m", type=Path, metavar="FILE", help="a base model (GGUF): does it fit?")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the report. 0: usable; 1: it would be refused; 2: no such file, or no such base model."""
    for path in (options.path, options.model):
        if path is not None and not exists(path):
            return _fail(f"{path}: no such file or folder")
    try:
        base = None if options.model is None else BaseModel.from_gguf(options.model)
    except InvalidRequest as error:
        return _fail(error.message)
    report = inspect(options.path, base)
    shown = [json.dumps(vars(report), indent=2)] if options.json else list(map(printable, lines(report)))
    print("\n".join(shown))
    return 0 if report.usable else 1


def _fail(message: str) -> int:
    print(f"error: {printable(message)}", file=sys.stderr)
    return _NO_SUCH_FILE


def inspect(path: Path, base: BaseModel | None = None) -> Report:
    """What is at ``path``. Whatever its content, nothing is raised: what is wrong is in the report."""
    if path.is_dir():
        if exists(path / CONFIG_FILE) or exists(path / WEIGHTS_FILE):
            return _adapter("PEFT LoRA adapter", survey_peft(path), base)
        return _no_adapter(path, f"the folder has no {CONFIG_FILE}{_adapters_within(path)}")
    if path.name == WEIGHTS_FILE:
        return _no_adapter(path, "this is a file of a PEFT folder; name the folder")
    try:
        with opened(path, _MAX_BYTES) as file:
            if file.head(4)[:4] != b"GGUF":
                return _no_adapter(path, "not a GGUF file (it does not begin with 'GGUF'), and not a PEFT folder")
            header, size = gguf_header(file), file.size
            kind = header.text("general.type")
    except (Refused, GgufError, OSError, MemoryError) as error:
        return _no_adapter(path, str(error) or "there is not enough memory to read it")
    if kind == "adapter":
        return _adapter("GGUF LoRA adapter", survey_gguf(path), base)
    if kind in ("", "model"):
        return _base_model(path, header, size)
    return _no_adapter(path, f"a GGUF file, but its general.type is {kind[:80]!r}, neither 'adapter' nor 'model'")


def _no_adapter(path: Path, why: str) -> Report:
    return Report(str(path), "no adapter", usable=False, problems=[why])


def _adapters_within(folder: Path) -> str:
    """The names of what may be adapters in ``folder``, for a message."""
    try:
        names = sorted(e.name for e in folder.iterdir() if e.suffix == ".gguf" or (e / CONFIG_FILE).is_file())
    except OSError:
        return ""
    return f"; it contains {', '.join(names[:8])}{' and more' * (len(names) > 8)}: name one" if names else ""


def _base_model(path: Path, header: GgufHeader, size: int) -> Report:
    try:
        base = BaseModel.from_gguf(path)
    except InvalidRequest as error:
        return _no_adapter(path, error.message.removeprefix(f"base model {path}: "))
    kinds = Counter(tensor.type.name for tensor in header.tensors.values())
    file_type = header.metadata.get("general.file_type")
    names = {kind.value: kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in LlamaFileType}
    facts = {
        "name": base.name,
        "architecture": base.architecture,
        "size_bytes": size,
        "file_type": names.get(file_type) if isinstance(file_type, int) else None,
        "tensor_types": dict(kinds.most_common()),
        "n_layer": base.n_layer,
        "n_vocab": base.n_vocab,
        "tied_output": base.tied_output,
    }
    return Report(str(path), "base model", facts=facts)


def _adapter(kind: str, survey: Survey, base: BaseModel | None) -> Report:
    facts = _facts(survey)
    notes = list(survey.notes)
    if base is None:
        return Report(str(survey.path), kind, not survey.problems, facts, alike(survey.problems), notes)
    found = fit(survey, base)
    facts["model"] = {"path": str(base.path), "name": base.describe(), "fits": found.summary is not None}
    loaded = found.summary or found.rest
    if loaded is not None:
        facts |= _loaded(loaded)
        # the scale has a line of its own
        notes += [note for note in loaded.notes if note not in notes and ": scale = " not in note]
    return Report(str(survey.path), kind, found.summary is not None, facts, alike(found.problems), notes + _rest(found))


def _rest(found: Fit) -> list[str]:
    if found.rest is None:
        return []
    left = "; ".join(found.rest.left_out)
    return [f"--ignore-unsupported would load {found.rest.n_pairs} pairs; {left}"]


def _facts(survey: Survey) -> dict[str, Any]:
    ranks = [module.b.shape[-1] for module in survey.modules if module.b.shape]
    return {
        "digest": survey.digest or None,
        "size_bytes": survey.size_bytes,
        "types": survey.types,
        "n_pairs": len(survey.modules),
        "rank": spread(ranks) if ranks else None,
        "scale": scale_line(survey),
        "rslora": survey.rslora,
        "targets": grouped_targets(module.name for module in survey.modules),
        "base_name": survey.base_name,
        "architecture": survey.architecture,
        "invocation_tokens": list(survey.invocation_tokens),
        "resident_bytes": survey.resident_bytes,
    }


def _loaded(summary: AdapterSummary) -> dict[str, Any]:
    return {
        "n_pairs": summary.n_pairs,
        "scale_range": list(summary.scale),
        "tensors": grouped_targets(summary.targets),
        "resident_bytes": summary.resident_bytes,
    }


def lines(report: Report) -> list[str]:
    """The report for people."""
    found = [f"{report.path}: {report.kind}"]
    found += [f"  {label:<9} {text}" for label, text in _rows(report) if text]
    found += [f"  note      {note}" for note in report.notes]
    if report.problems:
        model = report.facts.get("model")
        beside = f" with {model['name']}" if model else ""
        found.append(f"  would be refused{beside}:" if report.kind != "no adapter" else "  because:")
        found += [f"    - {problem}" for problem in report.problems]
    return found


def _rows(report: Report) -> list[tuple[str, str]]:
    facts = report.facts
    if report.kind == "no adapter":
        return []
    if report.kind == "base model":
        types = ", ".join(f"{kind} ({n})" for kind, n in facts["tensor_types"].items())
        head = "the token embedding" if facts["tied_output"] else "a tensor of its own"
        return [
            ("name", facts["name"]),
            ("model", f"{facts['architecture']}, {facts['n_layer']} layers, {facts['n_vocab']} tokens"),
            ("size", megabytes(facts["size_bytes"])),
            ("type", f"{facts['file_type'] or 'not stated'}: {types}"),
            ("head", head),
        ]
    model = facts.get("model")
    tokens = facts["invocation_tokens"]
    memory = megabytes(facts["resident_bytes"]) if facts["resident_bytes"] else ""
    return [
        ("digest", f"sha256:{facts['digest']}" if facts["digest"] else "unknown, as it cannot be read whole"),
        ("size", f"{megabytes(facts['size_bytes'])}{' as ' * bool(facts['types'])}{', '.join(facts['types'])}"),
        ("rank", facts["rank"] or ""),
        ("scale", facts["scale"]),
        ("targets", f"{facts['targets']} ({facts['n_pairs']} pairs)" if facts["n_pairs"] else ""),
        ("tensors", facts.get("tensors", "")),
        ("made for", ", ".join(filter(None, (facts["base_name"], facts["architecture"])))),
        ("aLoRA", f"starts at the tokens {tokens[:16]}" if tokens else ""),
        ("memory", memory and f"{memory} when loaded{'' if model else ' in f16; on a quantised base half of it'}"),
        ("fits", f"{model['name']} ({model['path']})" if model and model["fits"] else ""),
    ]
