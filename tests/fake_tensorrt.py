"""A stand-in for TensorRT: the round graph of a bundle, run by ONNX Runtime on the memory of `fake_cuda`.

The bundle is one for TensorRT, or one for ONNX Runtime, whose sizes are then made to look fixed.

Contexts are as strict as the library's documentation: every address is given and aligned, shapes lie in the profile,
and a pass is captured only behind one of the same shapes.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from fake_cuda import FakeCudart

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.generation_config import read_stop_token_ids
from medusa_engine.runtime.manifest import GENERATION_NAME, TENSORRT, Manifest, file_sha256, graph_name, read_manifest
from medusa_engine.runtime.plan import Plan, Profile, Tensor, files_folder, write_plan

VERSION = "1.7.1.116"
CHUNK = 16  # most rows of a prompt chunk
_MAGIC = b"a plan of the stand-in"
_DTYPES = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "int64": "INT64",
    "int32": "INT32",
    "bool": "BOOL",
}


def make_plan(bundle: Path, path: Path, *, acceptance: str = "greedy") -> Path:
    """Write a plan, its sidecar and its files; the rows at the end of the bundle's cache become its slack."""
    manifest = read_manifest(bundle)
    limits = manifest.limits
    room = limits.cache_rows - limits.max_tree_nodes - limits.depth - 1
    manifest = replace(manifest, limits=replace(limits, max_length=min(limits.max_length, room)))
    path.write_bytes(_MAGIC)
    files_folder(path).mkdir()
    files = {}
    for name, facts in manifest.files.items():
        if not name.endswith((".onnx", ".bin")):
            copy(bundle / name, files_folder(path) / name)
            files[name] = facts
    graph = graph_name("round", acceptance)
    nodes = limits.max_tree_nodes
    plan = Plan(
        flavor="tensorrt-rtx",
        library_version=VERSION,
        compute_capability="8.9",
        graph=graph,
        acceptance=acceptance,
        bundle=manifest,
        graph_sha256=manifest.files[manifest.graphs[graph]]["sha256"],
        profiles=(
            Profile("decode", (nodes, nodes, nodes), (nodes, nodes, nodes)),
            Profile("prefill", (1, CHUNK, CHUNK), (1, 1, 1)),
        ),
        compaction="function",
        builder={"version_compatible": False, "workspace_mib": 0},
        io=tuple(io_of(bundle, manifest, acceptance)),
        plan={"bytes": len(_MAGIC), "sha256": file_sha256(path)},
        files=files,
    )
    write_plan(path, plan)
    return path


def io_of(bundle: Path, manifest: Manifest, acceptance: str) -> list[Tensor]:
    limits = manifest.limits
    stop_ids = max(len(read_stop_token_ids(bundle / GENERATION_NAME)), 1)
    nodes, path = limits.max_tree_nodes, limits.depth + 1
    state = {"input_ids": (1, -1), "position_ids": (1, -1), "past_length": (1,), "pending_rows": (path,)}
    state |= {"pending_count": (1,), "token_budget": (1,)}
    inputs: dict[str, tuple[str, tuple[int, ...]]] = {name: ("int64", shape) for name, shape in state.items()}
    inputs |= {"tree_mask": ("bool", (-1, -1)), "logit_rows": ("int64", (-1,)), "finished": ("bool", (1,))}
    inputs |= {"retrieve_indices": ("int64", (nodes, path)), "tree_indices": ("int64", (nodes,))}
    inputs |= {"stop_ids": ("int64", (stop_ids,))}
    if acceptance != "greedy":
        inputs |= {"uniforms": ("float32", (limits.cache_rows,)), "top_k": ("int64", (1,))}
        inputs |= dict.fromkeys(("temperature", "top_p", "min_p"), ("float32", (1,)))
    if acceptance == "typical":
        inputs |= dict.fromkeys(("posterior_threshold", "posterior_alpha"), ("float32", (1,)))
        inputs |= {"root_drawn": ("bool", (1,))}
    outputs: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in {"accepted_tokens": (path,), "accepted_count": (1,)}.items():
        outputs[name] = ("int64", shape)
    for name, shape in state.items():
        outputs[f"next_{name}"] = ("int64", tuple(nodes if size < 0 else size for size in shape))
    outputs["next_finished"] = ("bool", (1,))
    if limits.lookup:
        inputs["history"] = outputs["next_history"] = ("int64", (limits.cache_rows,))
    cache = (manifest.dtype, (1, limits.kv_heads, limits.cache_rows, limits.head_dim))
    for layer in range(limits.layers):
        for kind in ("key", "value"):
            inputs[f"past_{kind}.{layer}"] = outputs[f"present_{kind}.{layer}"] = cache
    return [
        Tensor(name, mode, dtype, shape)
        for mode, tensors in (("input", inputs), ("output", outputs))
        for name, (dtype, shape) in tensors.items()
    ]


@dataclass
class FakePlan:
    """An engine over a plan of the stand-ins.

    Attributes:
        cudart: what CUDA was asked to do.
        contexts: execution contexts that were made.
    """

    engine: Engine
    cudart: FakeCudart
    contexts: list[FakeContext]


def open_plan(bundle: Path, path: Path, cudart: FakeCudart | None = None, **module: Any) -> FakePlan:
    """Open a plan with both stand-ins in the places of the libraries; `module` replaces attributes of TensorRT's."""
    cudart = cudart or FakeCudart()
    contexts: list[FakeContext] = []
    tensorrt = tensorrt_module(bundle, cudart, contexts)
    vars(tensorrt).update(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tensorrt_rtx", tensorrt)
        patch.setitem(sys.modules, "cuda.bindings.runtime", cudart)
        engine = Engine.open(path)
    return FakePlan(engine, cudart, contexts)


def tensorrt_module(bundle: Path, cudart: FakeCudart, contexts: list[FakeContext]) -> Any:
    class ILogger:
        pass

    class Runtime:
        def __init__(self, logger: Any) -> None:
            self._logger = logger

        def deserialize_cuda_engine(self, data: Any) -> FakeEngine | None:
            if bytes(data[:]) != _MAGIC:
                self._logger.log("Severity.ERROR", "it is garbage")
                return None
            return FakeEngine(module, bundle, cudart, contexts)

    module = SimpleNamespace(
        __name__="tensorrt_rtx",
        __version__=VERSION,
        ILogger=ILogger,
        Runtime=Runtime,
        DataType=SimpleNamespace(**{name: name for name in (*_DTYPES.values(), "BF16", "INT32")}),
        TensorIOMode=SimpleNamespace(INPUT="in", OUTPUT="out"),
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="user", STATIC="static"),
        DynamicShapesKernelSpecializationStrategy=SimpleNamespace(EAGER="eager", LAZY="lazy"),
        acceptance="greedy",
        before_pass=lambda context: True,  # may refuse, or do what a pass must not
    )
    return module


class FakeEngine:
    device_memory_size_v2 = 1000

    def __init__(self, module: Any, bundle: Path, cudart: FakeCudart, contexts: list[FakeContext]) -> None:
        self.module, self.cudart, self.contexts = module, cudart, contexts
        manifest = read_manifest(bundle)
        self.limits = manifest.limits
        self.fixed = manifest.target == TENSORRT
        self.io = {tensor.name: tensor for tensor in io_of(bundle, manifest, module.acceptance)}
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.sessions = {
            policy: ort.InferenceSession(
                bundle / manifest.graphs[graph_name("round", policy)], options, providers=["CPUExecutionProvider"]
            )
            for policy in {"greedy", module.acceptance}
        }
        self.num_io_tensors = len(self.io)

    def get_tensor_name(self, index: int) -> str:
        return list(self.io)[index]

    def get_tensor_mode(self, name: str) -> str:
        return "in" if self.io[name].mode == "input" else "out"

    def get_tensor_dtype(self, name: str) -> str:
        return _DTYPES[self.io[name].dtype]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.io[name].shape

    def create_runtime_config(self) -> Any:
        config = SimpleNamespace(dynamic_shapes_kernel_specialization_strategy="lazy", strategy="static")
        config.set_execution_context_allocation_strategy = lambda strategy: vars(config).update(strategy=strategy)
        return config

    def create_execution_context(self, config: Any) -> FakeContext:
        assert getattr(config, "strategy", config) == "user"
        self.contexts.append(FakeContext(self))
        return self.contexts[-1]


class FakeContext:
    """Attributes:
    passes: that were enqueued, captured ones too.
    addresses: of every input and output.
    """

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.addresses: dict[str, int] = {}
        self.shapes = {name: tensor.shape for name, tensor in engine.io.items()}
        self.profile = 0
        self.passes = 0
        self._scratch: tuple[int, int] | None = None
        self._warm = False  # whether a pass of these shapes was enqueued

    def set_device_memory(self, address: int, count: int) -> None:
        assert count >= self.engine.device_memory_size_v2 and address % 256 == 0
        assert self.engine.cudart.holds(address, count)
        self._scratch = (address, count)

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return profile in (0, 1)

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return name in self.engine.io and address % 256 == 0

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if self.shapes[name] != shape:
            self._warm = False
        self.shapes[name] = shape
        limits = self.engine.limits
        nodes, rows = limits.max_tree_nodes, 1 if name == "logit_rows" else CHUNK
        sizes = [size for size, open_ in zip(shape, self.engine.io[name].shape, strict=True) if open_ < 0]
        return all(size == nodes if self.profile == 0 else 1 <= size <= rows for size in sizes)

    def execute_async_v3(self, stream: int) -> bool:
        cudart = self.engine.cudart
        stream_ = cudart.streams[stream]
        if not self.engine.module.before_pass(self):
            return False
        assert self._scratch is not None and set(self.addresses) == set(self.engine.io)
        assert all(min(shape) >= 0 for shape in self.shapes.values() if shape)
        if stream_.captured is not None and not self._warm:
            stream_.broken = True
            return False
        self._warm = True
        self.passes += 1
        cudart.put(stream_, self._bound_pass())
        return True

    def _bound_pass(self) -> Callable[[], None]:
        """The pass with the shapes and addresses of now."""
        io, addresses, shapes = self.engine.io, dict(self.addresses), dict(self.shapes)
        for name, tensor in io.items():
            count = int(np.prod(shapes[name])) * np.dtype(tensor.dtype).itemsize
            assert self.engine.cudart.holds(addresses[name], count), name
        cache = [name for name in io if name.startswith(("past_key", "past_value"))]
        assert all(addresses[name] == addresses[name.replace("past", "present")] for name in cache)

        def run() -> None:
            def view(name: str) -> Any:
                pointer = ctypes.cast(addresses[name], ctypes.POINTER(ctypes.c_uint8))
                count = int(np.prod(shapes[name])) * np.dtype(io[name].dtype).itemsize
                return np.ctypeslib.as_array(pointer, (count,)).view(io[name].dtype).reshape(shapes[name])

            inputs = {name: view(name) for name, tensor in io.items() if tensor.mode == "input"}
            policy = self.engine.module.acceptance
            if not self.engine.fixed:
                policy = _free(inputs, policy)
            session = self.engine.sessions[policy]
            given = {value.name for value in session.get_outputs()}
            binding = session.io_binding()
            for name, array in ((value.name, inputs[value.name]) for value in session.get_inputs()):
                binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
            for name in io:
                if name in given:
                    array = view(name)
                    binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
            session.run_with_iobinding(binding)
            if "next_history" not in given and "next_history" in io:  # a graph for ONNX Runtime keeps none
                root, count = len(inputs["history"]), int(view("accepted_count")[0])
                history = view("next_history")
                history[:root] = inputs["history"]
                history[root : root + count] = view("accepted_tokens")[:count]

        return run


def _free(inputs: dict[str, Any], policy: str) -> str:
    """Change a plan's inputs into those of a graph for ONNX Runtime; returns the policy whose graph takes them."""
    paths = inputs["retrieve_indices"]
    if "history" in inputs:  # that of the tokens before the root, those of this chunk included
        history, positions = inputs["history"].copy(), inputs["position_ids"][0]
        history[positions] = inputs["input_ids"][0]
        inputs["history"] = history[: positions[paths[0, 0]]]
    inputs["retrieve_indices"] = np.ascontiguousarray(paths[paths[:, 0] >= 0])
    if "uniforms" in inputs:
        rows = inputs["position_ids"][0, inputs["logit_rows"]]
        inputs["uniforms"] = np.ascontiguousarray(inputs["uniforms"][rows])
        inputs["ranks"] = np.zeros(int(inputs["top_k"][0]), dtype=np.int64)
        if inputs["temperature"][0] == 0:  # which such a graph does not take
            return "greedy"
    return policy
