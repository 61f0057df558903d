"""Where the modules of a Hugging Face model lie in a GGUF base model, for each architecture whose rules are known.

Names come from the ``gguf`` package's tables. What llama.cpp's converter changes in a weight on its way to GGUF must
happen to an adapter's rows too, and no table says that; an architecture is listed here once its conversion class
(``conversion/*.py`` of llama.cpp) was read:

- LlamaModel and what derives from it without ``undo_permute = False`` interleaves the two halves of each head in the
  rows of q_proj and k_proj. (Weights in Mistral's own format already lie so; Hugging Face's, which adapters are
  trained on, do not.)
- The others pass every matrix of a dense layer through unchanged. Gemma changes its norms, which no LoRA touches.
- Phi3MiniModel keeps qkv_proj (q, k, v one below the other) and gate_up_proj (gate, up) as one tensor each; any model
  may have its q, k and v fused so (``--fuse-qkv``), after the interleaving.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map

from loraproxy.adapters.base_model import OUTPUT, BaseModel
from loraproxy.adapters.checks import Refused
from loraproxy.adapters.pairs import Place, Rows


@dataclass(frozen=True)
class Architecture:
    """How Hugging Face weights of one architecture differ from its GGUF weights.

    interleaved: rows of q_proj and k_proj are, by LlamaModel.permute.
    """

    arch: MODEL_ARCH
    interleaved: bool


_INTERLEAVED = {
    "llama": True,  # Mistral as well
    "mistral3": True,
    "smollm3": True,
    "granite": True,
    "qwen2": False,
    "qwen3": False,
    "qwen3moe": False,
    "gemma": False,
    "gemma2": False,
    "gemma3": False,
    "phi3": False,
}
_BY_NAME = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
# an older gguf package does not know them all
ARCHITECTURES = {
    name: Architecture(_BY_NAME[name], interleaved) for name, interleaved in _INTERLEAVED.items() if name in _BY_NAME
}

_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")
_FUSED = {"qkv_proj": _QKV, "gate_up_proj": _GATE_UP}
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d{1,6})\.(?P<leaf>\w+)", re.ASCII)
"""A module of one expert, as Mixtral's and Qwen's have them; GGUF stacks those of all experts."""


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
    """From the module names of a Hugging Face model to places in one base model."""

    def __init__(self, base: BaseModel) -> None:
        """Raises Refused if the architecture's rules are not known."""
        self._base = base
        self._architecture = architecture_of(base)
        self._map = _name_map(self._architecture.arch, max(base.n_layer, 1))

    def places(self, module: str) -> tuple[Place, ...]:
        """Where the output rows of ``module`` lie, in the order of its rows; empty if the base has no such module.

        ``model.layers.0.self_attn.o_proj`` is one tensor; ``qkv_proj`` three, where the base has them apart; and
        ``q_proj`` some rows of one, where the base has it fused.
        """
        if match := _EXPERT.fullmatch(module):
            return self._of_expert(match["experts"], int(match["number"]), match["leaf"])
        parent, _, leaf = module.rpartition(".")
        if leaf in _FUSED:
            return self._fused_module(parent, leaf)
        if leaf in _QKV and (fused := self._qkv_of(parent)):
            return (Place(fused, (self._qkv_rows(fused)[_QKV.index(leaf)],)),)
        if leaf in _GATE_UP and (fused := self._gate_up_of(parent)):
            return (Place(fused, (self._halves(fused)[_GATE_UP.index(leaf)],)),)
        return self._whole(module, 0)

    def _of_expert(self, experts: str, number: int, leaf: str) -> tuple[Place, ...]:
        target = self._target(f"{experts}.{leaf}")
        shape = None if target is None else self._base.shape_of(target)
        if target is None or shape is None or len(shape) != 3:
            return ()
        n_expert, n_rows, _ = shape
        if number >= n_expert:
            raise Refused(f"module {experts}.{number}.{leaf}: the {self._base.describe()} has {n_expert} experts")
        return (Place(target, (Rows(0, 0, n_rows),), number),)

    def _fused_module(self, parent: str, leaf: str) -> tuple[Place, ...]:
        """The place of a module that is fused in the Hugging Face model."""
        if leaf == "qkv_proj" and (fused := self._qkv_of(parent)):
            return (Place(fused, _side_by_side(self._qkv_rows(fused))),)
        if leaf == "gate_up_proj" and (fused := self._gate_up_of(parent)):
            return (Place(fused, _side_by_side(self._halves(fused))),)
        places: list[Place] = []
        source = 0
        for part in _FUSED[leaf]:
            place = self._whole(f"{parent}.{part}", source)
            if not place:
                return ()
            places += place
            source += place[0].rows[0].n_rows
        return tuple(places)

    def _whole(self, module: str, source: int) -> tuple[Place, ...]:
        """The tensor that is all of ``module``, whose rows begin at ``source`` of what the adapter has."""
        target = self._target(module)
        shape = None if target is None else self._base.shape_of(target)
        if target is None or shape is None or len(shape) != 2:
            return ()
        n_rows = shape[1] if target == "token_embd.weight" else shape[0]
        return (Place(target, (Rows(source, 0, n_rows, self._heads(target, n_rows)),)),)

    def _target(self, module: str) -> str | None:
        """``model.layers.0.self_attn.q_proj`` to ``blk.0.attn_q.weight``; None if the tables have no such tensor.

        An adapter of the bare model (without its language-model head) lacks the leading ``model.``; one of a model
        that also sees has ``language_model.`` somewhere.
        """
        module = module.replace("language_model.", "", 1)
        if module == "lm_head":
            return OUTPUT
        for name in (module, f"model.{module}"):
            if found := self._map.get_name(name):
                return f"{found}.weight"
        return None

    def _heads(self, target: str, n_rows: int) -> int:
        """Heads by which the rows of a whole tensor are interleaved; 0 for none. Raises Refused if they cannot be."""
        kind = target.split(".", 2)[-1]
        heads = {"attn_q.weight": self._base.n_head, "attn_k.weight": self._base.n_head_kv}.get(kind)
        if heads is None or not self._architecture.interleaved:
            return 0
        layer = int(target.split(".")[1])
        n_head = heads[layer] if layer < len(heads) else 0
        if n_head == 0 or n_rows % (2 * n_head):
            raise Refused(f"tensor {target}: {n_rows} rows do not divide into the base model's {n_head} heads")
        return n_head

    def _qkv_of(self, parent: str) -> str | None:
        """The tensor that holds q, k and v of an attention module, if the base has them fused."""
        target = self._target(f"{parent}.q_proj")
        if target is None or target in self._base.tensors:
            return None
        fused = target.replace("attn_q.", "attn_qkv.")
        return fused if len(self._base.tensors.get(fused, ())) == 2 else None

    def _qkv_rows(self, fused: str) -> tuple[Rows, Rows, Rows]:
        """Where q, k and v lie in it, each as a module of its own. Raises Refused if heads and rows do not agree."""
        layer, n_rows = int(fused.split(".")[1]), self._base.tensors[fused][0]
        heads = self._base.n_head[layer : layer + 1] + self._base.n_head_kv[layer : layer + 1]
        n_head, n_head_kv = heads if len(heads) == 2 else (0, 0)
        head = n_rows // max(n_head + 2 * n_head_kv, 1)
        if head % 2 or head * (n_head + 2 * n_head_kv) != n_rows:
            raise Refused(f"tensor {fused}: {n_rows} rows do not divide into q, k and v of {n_head} heads")
        q, kv = n_head * head, n_head_kv * head
        interleaved = self._architecture.interleaved
        return (
            Rows(0, 0, q, n_head if interleaved else 0),
            Rows(0, q, kv, n_head_kv if interleaved else 0),
            Rows(0, q + kv, kv),
        )

    def _gate_up_of(self, parent: str) -> str | None:
        """The tensor that holds gate and up of a feed-forward module, if the base has them fused."""
        target = self._target(f"{parent}.up_proj")
        shape = () if target is None else self._base.tensors.get(target, ())
        if target is None or len(shape) != 2 or shape[0] % 2:
            return None
        return None if target.replace("ffn_up.", "ffn_gate.") in self._base.tensors else target

    def _halves(self, fused: str) -> tuple[Rows, Rows]:
        half = self._base.tensors[fused][0] // 2
        return Rows(0, 0, half), Rows(0, half, half)


def _side_by_side(rows: tuple[Rows, ...]) -> tuple[Rows, ...]:
    """Rows of modules that lie one below the other in the Hugging Face weight as they do in the base."""
    return tuple(Rows(part.at, part.at, part.n_rows, part.heads) for part in rows)


@lru_cache(maxsize=4)
def _name_map(arch: MODEL_ARCH, n_layer: int) -> TensorNameMap:
    """Building the table of a model takes longer than reading an adapter for it."""
    return get_tensor_name_map(arch, n_layer)
