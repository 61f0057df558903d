"""A program: a small graph on a Vulkan device with the delta path's callback, compared with numpy.

Run with the library folder of a ready-built llama.cpp that has ggml's Vulkan library as its argument and in
``LD_LIBRARY_PATH``: all of ggml comes from there, as the libraries of llama-cpp-python are of another version.
Prints one line of JSON: ``{"device": null}`` or the device's description, and for every case the largest error and the
root mean square of the delta.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]
NativeSet = list[tuple[int, float]]

F32, I32 = 0, 26
USAGE_WEIGHTS = 1
N_VOCAB, N_EMBD, SHAPES = 40, 96, {"q.weight": 160, "k.weight": 32}

SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_backend_dev_count": (ctypes.c_size_t, []),
    "ggml_backend_dev_get": (ctypes.c_void_p, [ctypes.c_size_t]),
    "ggml_backend_dev_name": (ctypes.c_char_p, [ctypes.c_void_p]),
    "ggml_backend_dev_description": (ctypes.c_char_p, [ctypes.c_void_p]),
    "ggml_backend_dev_init": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]),
    "ggml_backend_name": (ctypes.c_char_p, [ctypes.c_void_p]),
    "ggml_backend_alloc_ctx_tensors": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p]),
    "ggml_backend_buffer_set_usage": (None, [ctypes.c_void_p, ctypes.c_int]),
    "ggml_backend_buffer_is_host": (ctypes.c_bool, [ctypes.c_void_p]),
    "ggml_backend_tensor_set": (None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]),
    "ggml_backend_tensor_get": (None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]),
    "ggml_backend_sched_new": (
        ctypes.c_void_p,
        [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_bool, ctypes.c_bool],
    ),
    "ggml_backend_sched_set_eval_callback": (None, [ctypes.c_void_p] * 3),
    "ggml_backend_sched_alloc_graph": (ctypes.c_bool, [ctypes.c_void_p] * 2),
    "ggml_backend_sched_graph_compute": (ctypes.c_int, [ctypes.c_void_p] * 2),
    "ggml_backend_sched_get_tensor_backend": (ctypes.c_void_p, [ctypes.c_void_p] * 2),
    "ggml_backend_sched_reset": (None, [ctypes.c_void_p]),
    "ggml_backend_sched_free": (None, [ctypes.c_void_p]),
    "ggml_backend_buffer_free": (None, [ctypes.c_void_p]),
    "ggml_backend_free": (None, [ctypes.c_void_p]),
    "ggml_free": (None, [ctypes.c_void_p]),
    "ggml_new_tensor_1d": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]),
    "ggml_new_tensor_2d": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]),
    "ggml_set_name": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]),
    "ggml_set_input": (None, [ctypes.c_void_p]),
    "ggml_set_output": (None, [ctypes.c_void_p]),
    "ggml_get_rows": (ctypes.c_void_p, [ctypes.c_void_p] * 3),
    "ggml_mul_mat": (ctypes.c_void_p, [ctypes.c_void_p] * 3),
    "ggml_new_graph": (ctypes.c_void_p, [ctypes.c_void_p]),
    "ggml_build_forward_expand": (None, [ctypes.c_void_p] * 2),
}


class InitParams(ctypes.Structure):
    """``ggml_init_params``."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Ggml:
    """ggml's public API as attributes without their prefix: ``ggml.mul_mat``."""

    def __init__(self, folder: Path) -> None:
        flags = ctypes.RTLD_GLOBAL
        self._libraries = [ctypes.CDLL(str(folder / f"lib{name}.so.0"), flags) for name in ("ggml", "ggml-base")]
        for name, (result, arguments) in SIGNATURES.items():
            function = next(getattr(library, name) for library in self._libraries if hasattr(library, name))
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)
        self._init = self._libraries[1].ggml_init
        self._init.restype, self._init.argtypes = ctypes.c_void_p, [InitParams]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def context(self) -> Any:
        """A context for the descriptions of tensors."""
        return self._init(InitParams(1 << 20, None, True))

    def devices(self) -> dict[str, Any]:
        """Devices by name."""
        found = [self.backend_dev_get(i) for i in range(self.backend_dev_count())]
        return {self.backend_dev_name(device).decode(): device for device in found}

    def write(self, tensor: Any, values: NDArray[Any]) -> None:
        """Copy ``values`` to a tensor's memory."""
        values = np.ascontiguousarray(values)
        self.backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)

    def read(self, tensor: Any, *shape: int) -> Values:
        """A copy of an F32 tensor."""
        values = np.empty(shape, np.float32)
        self.backend_tensor_get(tensor, values.ctypes.data, 0, values.nbytes)
        return values


class Graph:
    """Embeddings and two products of them, with their weights on ``device``, computed under the delta path."""

    def __init__(self, ggml: Ggml, device: Any, cpu: Any, delta: Any) -> None:
        random = np.random.default_rng(0)
        self.ggml, self.delta = ggml, delta
        self.backends = [ggml.backend_dev_init(d, None) for d in (device, cpu)]
        self.weights = {"token_embd.weight": random.normal(0, 1, (N_VOCAB, N_EMBD)).astype(np.float32)} | {
            name: random.normal(0, N_EMBD**-0.5, (n_out, N_EMBD)).astype(np.float32) for name, n_out in SHAPES.items()
        }
        self.context = ggml.context()
        self.tensors = {
            name: ggml.set_name(ggml.new_tensor_2d(self.context, F32, *values.shape[::-1]), name.encode())
            for name, values in self.weights.items()
        }
        self.buffer = ggml.backend_alloc_ctx_tensors(self.context, self.backends[0])
        assert not ggml.backend_buffer_is_host(self.buffer), "this device's memory is the host's"
        ggml.backend_buffer_set_usage(self.buffer, USAGE_WEIGHTS)
        for name, values in self.weights.items():
            ggml.write(self.tensors[name], values)
        array = (ctypes.c_void_p * 2)(*self.backends)
        self.scheduler = ggml.backend_sched_new(array, None, 2, 64, False, False)
        ggml.backend_sched_set_eval_callback(self.scheduler, delta.callback, delta.user_data)

    def compute(self, tokens: NDArray[np.int32]) -> dict[str, Values]:
        """The results by weight, (rows, n_out)."""
        ggml = self.ggml
        context = ggml.context()
        ids = ggml.new_tensor_1d(context, I32, len(tokens))
        ggml.set_input(ids)
        x = ggml.get_rows(context, self.tensors["token_embd.weight"], ids)
        nodes = {name: ggml.mul_mat(context, self.tensors[name], x) for name in SHAPES}
        graph = ggml.new_graph(context)
        for node in nodes.values():
            ggml.set_output(node)
            ggml.build_forward_expand(graph, node)
        ggml.backend_sched_reset(self.scheduler)
        assert ggml.backend_sched_alloc_graph(self.scheduler, graph)
        for node in nodes.values():
            assert ggml.backend_sched_get_tensor_backend(self.scheduler, node) == self.backends[0]
        ggml.write(ids, tokens)
        assert ggml.backend_sched_graph_compute(self.scheduler, graph) == 0
        results = {name: ggml.read(node, len(tokens), SHAPES[name]) for name, node in nodes.items()}
        ggml.free(context)
        return results

    def close(self) -> None:
        """Free what lives on the device."""
        self.ggml.backend_sched_free(self.scheduler)
        self.ggml.backend_buffer_free(self.buffer)
        self.ggml.free(self.context)
        for backend in self.backends:
            self.ggml.backend_free(backend)


Pairs = dict[str, tuple[Values, Values, float]]


def make_pairs(ranks: dict[str, int], seed: int) -> Pairs:
    """By weight: A (rank, n_in), B (n_out, rank), scale."""
    random = np.random.default_rng(seed)
    pairs = {}
    for name, rank in ranks.items():
        embeds = name == "token_embd.weight"
        n_in, n_out = (N_VOCAB, N_EMBD) if embeds else (N_EMBD, SHAPES[name])
        a = random.normal(0, 1 if embeds else n_in**-0.5, (rank, n_in)).astype(np.float32)
        b = random.normal(0, rank**-0.5, (n_out, rank)).astype(np.float32)
        pairs[name] = (a, b, 0.5)
    return pairs


def expected(
    graph: Graph, tokens: NDArray[np.int32], sets: list[NativeSet], adapters: dict[int, Pairs]
) -> dict[str, Values]:
    """What ``compute`` should give for rows under ``sets``."""
    x = graph.weights["token_embd.weight"][tokens].astype(np.float64)
    for row, adapter_set in enumerate(sets):
        for i, scale in adapter_set:
            if "token_embd.weight" in adapters[i]:
                a, b, own = adapters[i]["token_embd.weight"]
                x[row] += scale * own * (b @ a[:, tokens[row]])
    results = {name: x @ graph.weights[name].T.astype(np.float64) for name in SHAPES}
    for name, out in results.items():
        for row, adapter_set in enumerate(sets):
            for i, scale in adapter_set:
                if name in adapters[i]:
                    a, b, own = adapters[i][name]
                    out[row] += scale * own * (b @ (a @ x[row]))
    return {name: out.astype(np.float32) for name, out in results.items()}


def insert(native: Any, delta: Any, adapters: dict[int, Pairs], ids: list[int]) -> None:
    for i in ids:
        builder = native.WeightsBuilder(delta, eight_bits=False)
        for name, pair in adapters[i].items():
            op = native.Op.get_rows if name == "token_embd.weight" else native.Op.mul_mat
            builder.add(delta.find_target(name, op), *pair)
        delta.add_adapter(i, builder.finish())


def run_cases(native: Any, graph: Graph, delta: Any) -> dict[str, dict[str, float]]:
    """The largest error and the delta's root mean square in every case.

    At most four rows: from five on ggml takes shaders that a software device needs minutes to compile.
    """
    adapters = {
        1: make_pairs({"q.weight": 4, "k.weight": 4}, 1),
        2: make_pairs({"q.weight": 17, "k.weight": 3}, 2),
        3: make_pairs({"token_embd.weight": 5, "k.weight": 1}, 3),
        4: make_pairs({"q.weight": 33, "token_embd.weight": 8}, 4),
    }
    random = np.random.default_rng(5)
    found: dict[str, dict[str, float]] = {}

    def check(case: str, sets: list[NativeSet], whole: bool = False) -> None:
        tokens = random.integers(0, N_VOCAB, len(sets)).astype(np.int32)
        if whole:
            delta.begin_chunk(sets[0], len(sets))
        else:
            delta.begin_rows(sets)
        results = graph.compute(tokens)
        complaint = delta.end()
        assert not complaint, complaint
        wanted = expected(graph, tokens, sets, adapters)
        base = expected(graph, tokens, [[]] * len(sets), adapters)
        errors = [np.abs(results[name] - wanted[name]).max() for name in SHAPES]
        deltas = np.concatenate([(wanted[name] - base[name]).ravel() for name in SHAPES])
        found[case] = {"error": float(max(errors)), "rms": float(np.sqrt(np.mean(deltas**2)))}

    delta.watch_begin()
    graph.compute(np.zeros(2, np.int32))
    delta.watch_end()
    insert(native, delta, adapters, [1, 2])
    check("base", [[], []])
    check("one adapter, one row", [[(1, 1.0)]])
    check("rows of their own", [[(1, 1.0)], [], [(2, 0.5)], [(1, -1.0)]])
    insert(native, delta, adapters, [3, 4])
    check("several in a set", [[(1, 1.0), (2, 1.0)], [], [(3, 1.0)], [(1, 0.5), (3, 1.0), (4, -1.0)]])
    check("a prompt chunk", [[(1, 1.0), (3, 0.5), (4, 1.0)]] * 4, whole=True)
    delta.remove_adapter(1)
    delta.remove_adapter(4)
    check("after two left", [[(2, 1.0)], [(3, 1.0)], []])
    insert(native, delta, adapters, [1, 4])
    check("after they came back", [[(4, 1.0)], [(2, 1.0)], [(1, 1.0)]])
    return found


def main(folder: Path) -> None:
    sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL)
    ggml = Ggml(folder)
    devices = ggml.devices()
    name = next((name for name in devices if name.startswith("Vulkan")), None)
    if name is None:
        print(json.dumps({"device": None}))
        return
    from loraproxy import _native as native

    delta = native.Delta(1)
    graph = Graph(ggml, devices[name], devices["CPU"], delta)
    cases = run_cases(native, graph, delta)
    graph.close()
    print(json.dumps({"device": ggml.backend_dev_description(devices[name]).decode(), "cases": cases}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
