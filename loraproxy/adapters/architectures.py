"""What is special about each architecture when a Hugging Face adapter meets a GGUF base model.

llama.cpp's converter changes some weights on the way to GGUF; the same must happen to an adapter's rows. Each
architecture whose changes are known has an entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map
from numpy.typing import NDArray

from loraproxy.adapters.base_model import BaseModel
from loraproxy.adapters.checks import Refused


class HeadRows(Enum):
    """Whose heads the rows of a permuted weight belong to."""

    QUERY = "q"
    KEY = "k"


@dataclass(frozen=True)
class Architecture:
    """How Hugging Face weights of one architecture differ from its GGUF weights.

    rope_permuted: tensor name within a layer to the heads its rows are permuted by (the two halves of each head
    interleaved, LlamaModel.permute of llama.cpp's conversion scripts).
    """

    arch: MODEL_ARCH
    rope_permuted: Mapping[str, HeadRows]


ARCHITECTURES = {
    MODEL_ARCH_NAMES[entry.arch]: entry
    for entry in (Architecture(MODEL_ARCH.LLAMA, {"attn_q.weight": HeadRows.QUERY, "attn_k.weight": HeadRows.KEY}),)
}


def architecture_of(base: BaseModel) -> Architecture:
    """The entry for ``base``. Raises Refused if its architecture has none."""
    if base.architecture not in ARCHITECTURES:
        raise Refused(
            f"PEFT folders for the architecture {base.architecture!r} cannot be read yet (known: "
            f"{', '.join(sorted(ARCHITECTURES))}); convert the adapter with llama.cpp's convert_lora_to_gguf.py "
            "and give the GGUF file instead"
        )
    return ARCHITECTURES[base.architecture]


class ModuleNames:
    """From the module names of a Hugging Face model to GGUF tensor names of one base model."""

    def __init__(self, base: BaseModel) -> None:
        self._map = get_tensor_name_map(architecture_of(base).arch, max(base.n_layer, 1))

    def target(self, module: str) -> str | None:
        """``model.layers.0.self_attn.q_proj`` to ``blk.0.attn_q.weight``; None if there is no such tensor.

        An adapter of the bare model (without its language-model head) lacks the leading ``model.``.
        """
        for name in (module, f"model.{module}"):
            if found := self._map.get_name(name):
                return f"{found}.weight"
        return None


def permute_rows(base: BaseModel, target: str, b: NDArray[Any]) -> NDArray[Any]:
    """``b`` (n_out, rank) with its rows in the order that the GGUF base has. Raises Refused if they cannot be."""
    parts = target.split(".", 2)
    if parts[0] != "blk" or (rows := architecture_of(base).rope_permuted.get(parts[-1])) is None:
        return b
    heads = base.n_head if rows is HeadRows.QUERY else base.n_head_kv
    layer = int(parts[1])
    n_head = heads[layer] if layer < len(heads) else 0
    n_out, rank = b.shape
    if n_head == 0 or n_out % (2 * n_head):
        raise Refused(f"tensor {target}: {n_out} rows do not divide into the base model's {n_head} heads")
    permuted: NDArray[Any] = b.reshape(n_head, 2, n_out // n_head // 2, rank).swapaxes(1, 2).reshape(n_out, rank)
    return permuted
