"""Arrays bound to a session once, read and written where they lie."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from medusa_engine.runtime.graph_binding import GraphBinding
from medusa_engine.runtime.providers import CPU


def accumulator() -> ort.InferenceSession:
    """y [N] = x [N] + step [1], and the cache gets the sum of y added."""
    nodes = [
        helper.make_node("Add", ["x", "step"], ["y"]),
        helper.make_node("ReduceSum", ["y"], ["sum"], keepdims=0),
        helper.make_node("Add", ["past_cache", "sum"], ["present_cache"]),
    ]
    kinds = {"x": ["N"], "step": [1], "past_cache": [1], "y": ["N"], "present_cache": [1]}
    value = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in kinds.items()}
    inputs, outputs = [value[name] for name in ("x", "step", "past_cache")], [value["y"], value["present_cache"]]
    graph = helper.make_graph(nodes, "accumulator", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


class Counting:
    """An `IOBinding` that counts which names it is told."""

    def __init__(self, binding: ort.IOBinding) -> None:
        self._binding = binding
        self.told: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._binding, name)

    def bind_input(self, name: str, *rest: Any) -> None:
        self.told[name] += 1
        self._binding.bind_input(name, *rest)

    def bind_output(self, name: str, *rest: Any) -> None:
        self.told[name] += 1
        self._binding.bind_output(name, *rest)


@pytest.fixture
def cache() -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(np.zeros(1, dtype=np.float32), CPU, 0)


@pytest.mark.parametrize("provider", [CPU, "cuda"])
def test_what_arrays_hold_counts_in_each_run(cache: ort.OrtValue, provider: str) -> None:
    binding = GraphBinding(accumulator(), {"cache": cache}, provider)
    x, step, y = np.array([1, 2], np.float32), np.ones(1, np.float32), np.zeros(2, np.float32)
    binding.run({"x": x, "step": step}, {"y": y})
    assert y.tolist() == [2, 3] and cache.numpy().tolist() == [5]
    step[0] = 10
    binding.run({"x": x, "step": step}, {"y": y})
    assert y.tolist() == [11, 12] and cache.numpy().tolist() == [28]


def test_other_arrays_take_the_place_of_those_before(cache: ort.OrtValue) -> None:
    binding = GraphBinding(accumulator(), {"cache": cache}, CPU)
    step = np.ones(1, np.float32)
    for size in (2, 3, 2):
        # The array of the run before is gone; a new one may lie where it lay.
        x, y = np.full(size, size, np.float32), np.zeros(size, np.float32)
        binding.run({"x": x, "step": step}, {"y": y})
        assert y.tolist() == [size + 1] * size


def test_an_array_is_told_once(cache: ort.OrtValue) -> None:
    binding = GraphBinding(accumulator(), {"cache": cache}, CPU)
    counting = binding._binding = Counting(binding._binding)
    x, step, y = np.zeros(2, np.float32), np.ones(1, np.float32), np.zeros(2, np.float32)
    for _ in range(3):
        binding.run({"x": x, "step": step}, {"y": y})
    binding.run({"x": x.copy(), "step": step}, {"y": y})
    assert counting.told == {"x": 2, "step": 1, "y": 1}


def test_inputs_that_are_copied_to_a_device_are_told_for_each_run(cache: ort.OrtValue) -> None:
    binding = GraphBinding(accumulator(), {"cache": cache}, "cuda")
    counting = binding._binding = Counting(binding._binding)
    x, step, y = np.zeros(2, np.float32), np.ones(1, np.float32), np.zeros(2, np.float32)
    for _ in range(3):
        binding.run({"x": x, "step": step}, {"y": y})
    assert counting.told == {"x": 3, "step": 3, "y": 1}
