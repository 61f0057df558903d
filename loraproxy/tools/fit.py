"""Whether an adapter fits a base model, and all reasons why it does not."""

from __future__ import annotations

from dataclasses import dataclass, field

from loraproxy.adapters.base_model import TOKEN_EMBD, BaseModel
from loraproxy.adapters.checks import Refused, listed, matrix_of
from loraproxy.adapters.pairs import Part, Rows, plan_pairs
from loraproxy.adapters.peft_folder import made_for, plan_peft
from loraproxy.adapters.read import Unsupported, read_adapter
from loraproxy.adapters.tensors import AdapterSummary
from loraproxy.errors import InvalidAdapterFile
from loraproxy.tools.files import adapter_name
from loraproxy.tools.survey import Module, Survey

_MAX_MODULES = 1024


@dataclass
class Fit:
    """An adapter beside a base model.

    summary: what would be loaded; None if it is refused. rest: what --ignore-unsupported would load, where that
    would help. problems: why it is refused, all that were found.
    """

    base: BaseModel
    summary: AdapterSummary | None = None
    rest: AdapterSummary | None = None
    problems: list[str] = field(default_factory=list)

    def add(self, problem: str) -> None:
        """Note ``problem`` unless one that says as much is noted."""
        if not any(known.startswith(problem) for known in self.problems):
            self.problems.append(problem)


def fit(survey: Survey, base: BaseModel) -> Fit:
    """Read the adapter as the server would. Raises nothing for a faulty adapter."""
    found = Fit(base)
    name = adapter_name(survey.path)
    try:
        found.summary = read_adapter(name, survey.path, base).summary
    except InvalidAdapterFile as refusal:
        about = made_for(survey.base_name)
        found.problems.append(refusal.message.removeprefix(f"adapter {name!r} ({survey.path}): ").removesuffix(about))
        for problem in _each(survey, base):
            found.add(problem.removesuffix(about))
        found.rest = _rest(name, survey, base)
    return found


def _rest(name: str, survey: Survey, base: BaseModel) -> AdapterSummary | None:
    try:
        return read_adapter(name, survey.path, base, unsupported=Unsupported.LEAVE_OUT).summary
    except InvalidAdapterFile:
        return None


def _each(survey: Survey, base: BaseModel) -> list[str]:
    """Every module's own reason, and the file's."""
    problems = list(survey.problems)
    if survey.format == "gguf" and survey.architecture != base.architecture:
        problems.append(f"the adapter is for the architecture {survey.architecture!r}, not {base.architecture!r}")
    if survey.format == "peft" and not survey.config:
        return problems  # without a configuration nothing is known of the modules
    unknown = []
    for module in survey.modules[:_MAX_MODULES]:
        if survey.format == "gguf" and base.shape_of(module.name) is None:
            unknown.append(module.name)
            continue
        try:
            (_plan_gguf if survey.format == "gguf" else _plan_peft)(survey, module, base)
        except Refused as refusal:
            problems.append(str(refusal))
    if unknown:
        problems.append(f"tensors that the {base.describe()} does not have: {listed(unknown)}")
    return list(dict.fromkeys(problems))


def _plan_gguf(survey: Survey, module: Module, base: BaseModel) -> None:
    n_out, n_in = matrix_of(base, module.name)
    n_rows = n_in if module.name == TOKEN_EMBD else n_out
    rows = (Rows(0, 0, n_rows),)
    part = Part(module.name, module.a, module.b, module.scale, rows, n_rows, a_by_token=module.a_by_token)
    plan_pairs(base, [(module.name, part)])


def _plan_peft(survey: Survey, module: Module, base: BaseModel) -> None:
    tensors = {half.name: half for half in (module.a, module.b)}
    plan_peft(survey.config, tensors, base, Unsupported.LEAVE_OUT)
