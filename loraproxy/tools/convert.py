"""``loraproxy convert``: an adapter as a GGUF file that stock llama.cpp loads with the same result."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.gguf_write import AdapterDtype, write_gguf_adapter
from loraproxy.adapters.read import Unsupported, read_adapter
from loraproxy.adapters.tensors import Adapter, LoraTensor
from loraproxy.endings import ends_tidily
from loraproxy.errors import CommandFailed
from loraproxy.tools import files
from loraproxy.tools.progress import Progress

DESCRIPTION = (
    "Write an adapter as a GGUF file that stock llama.cpp loads with the same result: names, row order and every "
    "module's own scale (rsLoRA, rank and alpha patterns) are worked out here and folded into the weights."
)

_EXPECTED: dict[AdapterDtype, float] = {"f32": 1e-5, "f16": 2e-3, "bf16": 1e-2, "q8_0": 2e-2}
"""Relative errors beyond which a result is worth a note: some weights are out of the type's range."""


@dataclass(frozen=True)
class Converted:
    """What was written; worst: the tensor whose written pair differs most from what was read, and by how much.

    The error is ‖scale·B·A − written‖ / ‖scale·B·A‖ (Frobenius norms), 0 where both are zero.
    """

    adapter: Adapter
    n_bytes: int
    worst: str
    error: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``loraproxy convert``."""
    parser.add_argument("adapter", type=Path, metavar="PEFT_DIR", help="a PEFT folder, or a GGUF adapter to re-encode")
    parser.add_argument("output", type=Path, metavar="OUT.gguf", help="the file to write")
    parser.add_argument("--model", "-m", type=Path, required=True, metavar="FILE", help="the base model (GGUF)")
    parser.add_argument(
        "--outtype", type=str.lower, choices=get_args(AdapterDtype), default="f16", help="type of the weights (f16)"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT.gguf if it exists")
    parser.add_argument("--ignore-unsupported", action="store_true", help="convert the rest of what is not supported")


def run(options: argparse.Namespace) -> int:
    """Convert, and say what was written. Raises CommandFailed, and ApiError from reading base and adapter."""
    for path in (options.model, options.adapter):
        files.existing(path)
    inputs = (options.model, options.adapter, *options.adapter.glob("adapter_model*"))
    files.check_output(options.output, force=options.force, inputs=inputs)
    unsupported = Unsupported.LEAVE_OUT if options.ignore_unsupported else Unsupported.REFUSE
    with ends_tidily():
        result = convert(options.adapter, options.output, options.model, options.outtype, unsupported)
    adapter = result.adapter
    for note in (*adapter.notes, *adapter.left_out):
        print(files.printable(f"note: {note}"))
    written = files.printable(f"wrote {options.output}: {files.megabytes(result.n_bytes)}")
    print(
        f"{written}, {len(adapter.tensors)} pairs as {options.outtype}, scaling folded in; "
        f"read back, the largest relative error is {result.error:.1e} ({result.worst})"
    )
    if result.error > _EXPECTED[options.outtype]:
        print(f"note: {options.outtype} holds some weights badly; --outtype f32 is exact")
    return 0


def convert(
    source: Path,
    output: Path,
    model: Path,
    dtype: AdapterDtype = "f16",
    unsupported: Unsupported = Unsupported.REFUSE,
) -> Converted:
    """Write the adapter at ``source`` (PEFT or GGUF) to ``output``, read it back, and only then let it appear.

    Raises CommandFailed, InvalidRequest for the base model, InvalidAdapterFile for what cannot be read or written.
    """
    base = BaseModel.from_gguf(model)
    adapter = read_adapter(files.adapter_name(source), source, base, unsupported=unsupported)
    n_values = sum(tensor.a.size + tensor.b.size for tensor in adapter.tensors)
    files.check_room(output, n_values * 4)
    with files.new_file(output) as unfinished:
        write_gguf_adapter(adapter, base, unfinished, dtype)
        # an activated LoRA's tokens are written, but reading them back counts as leaving them out
        written = read_adapter(adapter.name, unfinished, base, unsupported=Unsupported.LEAVE_OUT)
        worst, error = _worst(adapter, written)
        n_bytes = unfinished.stat().st_size
    return Converted(adapter, n_bytes, worst, error)


def _worst(adapter: Adapter, written: Adapter) -> tuple[str, float]:
    """The target whose pair differs most, and its relative error."""
    theirs = {tensor.target: tensor for tensor in written.tensors}
    if theirs.keys() != {tensor.target for tensor in adapter.tensors}:
        raise CommandFailed("the file that was written holds other tensors than the adapter")
    errors: list[tuple[float, str]] = []
    with Progress("checking", len(adapter.tensors)) as progress:
        for tensor in adapter.tensors:
            errors.append((relative_error(tensor, theirs[tensor.target]), tensor.target))
            progress.advance(1, tensor.target)
    error, worst = max(errors)
    return worst, error


def relative_error(exact: LoraTensor, other: LoraTensor) -> float:
    """‖Δ − Δ'‖ / ‖Δ‖ of two pairs' products, never multiplied out: 0 if both are zero, infinite if only Δ is.

    The difference is a product itself, [B, -B'] · [A; A'], and the norm of a product L·R is that of the small
    matrix of the triangular factors of L and Rᵀ.
    """
    left, right = _scaled(exact)
    other_left, other_right = _scaled(other)
    size = _norm(left, right)
    difference = _norm(np.hstack([left, -other_left]), np.vstack([right, other_right]))
    if size == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / size


def _scaled(pair: LoraTensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return pair.b.astype(np.float64) * pair.scale, pair.a.astype(np.float64)


def _norm(left: NDArray[Any], right: NDArray[Any]) -> float:
    """The Frobenius norm of ``left @ right``."""
    left_factor: NDArray[np.float64] = np.asarray(np.linalg.qr(left, mode="r"))
    right_factor: NDArray[np.float64] = np.asarray(np.linalg.qr(right.T, mode="r"))
    return float(np.linalg.norm(left_factor @ right_factor.T))
