"""The Python face of the delta path: which weights adapters may target, and adapters' weights as they are kept."""

from __future__ import annotations

import llama_cpp  # noqa: F401  (its libraries must be loaded before the extension that links to them)

from loraproxy import _native
from loraproxy.adapters.sets import AdapterSet
from loraproxy.adapters.tensors import Adapter, LoraTensor, Op
from loraproxy.errors import InvalidAdapterFile

NativeSet = list[tuple[int, float]]


def native_set(adapters: AdapterSet) -> NativeSet:
    """The set as the extension takes it."""
    return list(adapters.entries)


class DeltaPath:
    """The adapters of one context and the callback that applies them.

    ``callback`` and ``user_data`` go into ``llama_context_params``; ``native`` into the decode calls.
    Adapters are prepared in any thread (``prepare``), and enter and leave (``insert``, ``remove``) in the
    engine's thread, between two steps.
    """

    def __init__(
        self, threads: int, kernels: str = "", *, own_products: bool = False, eight_bits: bool = False
    ) -> None:
        """``threads``: as many as the engine has. ``kernels``: avx512, avx2, neon, plain; "" picks the best.

        ``own_products``: take over the products of quantised weights from llama.cpp where there is a kernel.
        ``eight_bits``: keep adapters in 8 bits where the base's weight is quantised; elsewhere in f16.
        """
        self.eight_bits = eight_bits
        self.native = _native.Delta(threads, kernels, own_products)

    @property
    def callback(self) -> int:
        """The address of the ``ggml_backend_sched_eval_callback``."""
        return _native.Delta.callback

    @property
    def user_data(self) -> int:
        """The address that belongs to it."""
        return self.native.user_data

    def prepare(self, adapter: Adapter) -> _native.AdapterWeights:
        """Check every tensor against the graph and convert it.

        Raises InvalidAdapterFile naming the tensor and the reason.
        """
        preparation = Preparation(self, adapter.name)
        for tensor in adapter.tensors:
            preparation.add(tensor)
        return preparation.finish()

    def target(self, name: str, tensor: LoraTensor) -> int:
        """The index of the place that ``tensor`` corrects. Raises InvalidAdapterFile where there is none."""
        if tensor.n_expert:
            raise InvalidAdapterFile(
                f"adapter '{name}': '{tensor.target}' are the weights of experts, which only llama.cpp's own LoRA graph"
                " can correct, in a worker for one adapter set at a time"
            )
        op = _native_op(tensor)
        index = self.native.find_target(tensor.target, op)
        if index < 0 and tensor.target == "output.weight":
            # a tied output head multiplies the token embeddings
            index = self.native.find_target("token_embd.weight", op)
        if index < 0:
            raise InvalidAdapterFile(
                f"adapter '{name}': this model's graph has no {op.name} with '{tensor.target}', so the adapter cannot"
                " be applied there"
            )
        refusal = self.native.targets[index].refusal
        if refusal:
            raise InvalidAdapterFile(f"adapter '{name}': '{tensor.target}' cannot be corrected: {refusal}")
        return index

    def computes(self, tensor: LoraTensor) -> bool:
        """Whether the watched graph has the operation that ``tensor`` corrects."""
        return self.native.find_target(tensor.target, _native_op(tensor)) >= 0

    def insert(self, adapter_id: int, weights: _native.AdapterWeights) -> None:
        """From the next step on, requests may run under ``adapter_id``."""
        self.native.add_adapter(adapter_id, weights)

    def remove(self, adapter_id: int) -> None:
        """Forget the adapter and free its memory. No running request may use it."""
        self.native.remove_adapter(adapter_id)

    def nbytes(self, adapter_id: int) -> int:
        """Bytes that the adapter holds."""
        return self.native.adapter_bytes(adapter_id)


def _native_op(tensor: LoraTensor) -> _native.Op:
    return _native.Op.get_rows if tensor.op is Op.GET_ROWS else _native.Op.mul_mat


class Preparation:
    """An adapter's weights in the making: pairs are added one after the other, and may then be forgotten."""

    def __init__(self, delta: DeltaPath, name: str) -> None:
        self._delta = delta
        self._name = name
        self._builder = _native.WeightsBuilder(delta.native, delta.eight_bits)

    def add(self, tensor: LoraTensor) -> None:
        """Check a pair against the graph and convert it. Raises InvalidAdapterFile with the reason."""
        index = self._delta.target(self._name, tensor)
        try:
            self._builder.add(index, tensor.a, tensor.b, tensor.scale)
        except ValueError as problem:
            raise InvalidAdapterFile(f"adapter '{self._name}': {problem}") from None

    def finish(self) -> _native.AdapterWeights:
        """The weights; nothing can be added any more."""
        return self._builder.finish()
