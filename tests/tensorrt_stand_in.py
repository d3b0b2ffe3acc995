"""NVIDIA's `tensorrt.plugin` (Python sources) over a stand-in for the library behind it.

The sources come from the wheel tensorrt-cu13-bindings, which installs `tensorrt_bindings` and needs the full TensorRT
libraries only when it is imported itself. Types are TensorRT-RTX's; what that library lacks (ahead-of-time plugins,
symbolic expressions that Python can make) is here. `build` asks of a plugin what TensorRT asks while it builds.
"""

from __future__ import annotations

import enum
import importlib.util
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

Sizes = Mapping[str, int]


class Expression:
    """A dimension: a number, or a function of the sizes that are known when the engine runs."""

    def __init__(self, value: Callable[[Sizes], int], constant: bool) -> None:
        self.value = value
        self._constant = constant

    @staticmethod
    def of(size: int | str) -> Expression:
        if isinstance(size, str):
            return Expression(lambda sizes: sizes[size], False)
        return Expression(lambda _: size, True)

    def is_constant(self) -> bool:
        return self._constant

    def get_constant_value(self) -> int:
        assert self._constant
        return self.value({})


class ExpressionBuilder:
    def __init__(self, operations: Mapping[Any, Callable[[int, int], int]]) -> None:
        self._operations = operations

    def constant(self, value: int) -> Expression:
        return Expression.of(value)

    def operation(self, kind: Any, first: Expression, second: Expression) -> Expression:
        apply = self._operations[kind]
        return Expression(
            lambda sizes: apply(first.value(sizes), second.value(sizes)), first.is_constant() and second.is_constant()
        )


class QuickPluginCreationRequest(enum.Enum):
    UNKNOWN = 0
    PREFER_JIT = 1
    PREFER_AOT = 2
    STRICT_JIT = 3
    STRICT_AOT = 4


class Registry:
    def __init__(self) -> None:
        self.creators: dict[tuple[str, str, str], Any] = {}

    def register_creator(self, creator: Any, namespace: str) -> bool:
        key = creator.name, creator.plugin_version, namespace
        assert key not in self.creators
        self.creators[key] = creator
        return True

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        return self.creators[name, version, namespace]


def stand_in() -> Iterator[ModuleType]:
    """Put a module `tensorrt` in place whose `tensorrt.plugin` is NVIDIA's; take it away again at the end."""
    spec = importlib.util.find_spec("tensorrt_bindings")
    if spec is None:
        pytest.skip("needs tensorrt.plugin: python -m pip install --no-deps tensorrt-cu13-bindings")
    import tensorrt_rtx

    module = ModuleType("tensorrt")
    module.__dict__.update({name: getattr(tensorrt_rtx, name) for name in dir(tensorrt_rtx) if name[:2] != "__"})
    registry = Registry()
    module.__dict__.update(
        __path__=list(spec.submodule_search_locations or ()),
        __version__="stand-in",
        IDimensionExpr=Expression,
        DimsExprs=lambda length: [None] * length,
        IPluginV3QuickAOTBuild=type("IPluginV3QuickAOTBuild", (), {}),
        ISymExpr=type("ISymExpr", (), {}),
        QuickPluginCreationRequest=QuickPluginCreationRequest,
        get_plugin_registry=lambda: registry,
    )
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "tensorrt"}
    sys.modules["tensorrt"] = module
    try:
        yield module
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt"]:
            del sys.modules[name]
        sys.modules.update(before)


@dataclass(frozen=True)
class Built:
    """What TensorRT keeps of a plugin layer in the plan; the launch is evaluated with the sizes of a run."""

    kernel_name: str
    ptx: str
    output_types: list[Any]
    output_shapes: list[list[Expression]]
    aliased_inputs: list[int]
    combinations: list[tuple[Any, Any]]  # (type, format) of inputs and outputs, one combination after the other
    launch: SimpleNamespace  # expressions
    extra: dict[int, Any]

    def evaluated(self, sizes: Sizes) -> tuple[tuple[int, int, int], int, int, tuple[int, ...]]:
        """Return (grid, threads, shared bytes, extra scalars)."""
        value = {name: symbol.expr.value(sizes) for name, symbol in vars(self.launch).items()}
        assert value["block_y"] == value["block_z"] == 1
        scalars = tuple(self.extra[i].expr.value(sizes) for i in range(len(self.extra)))
        return (value["grid_x"], value["grid_y"], value["grid_z"]), value["block_x"], value["shared_mem"], scalars


class Setter(dict[int, Any]):
    """The extra scalars that tensorrt.plugin sets by index."""

    nbSymExprs = -1  # noqa: N815


def build(trt: Any, inputs: Sequence[tuple[Any, Sequence[int | str]]], outputs: Sequence[int]) -> Built:
    """Build one layer of the plugin as TensorRT's ONNX parser and builder do for a node with `aot` = 1.

    Args:
        inputs: type and shape of each; a name is a size that is known when the engine runs.
        outputs: for each output the input that has its type and shape.
    """
    kind = trt.DimensionOperation
    operations = {kind.SUM: operator.add, kind.SUB: operator.sub, kind.PROD: operator.mul}
    operations |= {kind.FLOOR_DIV: operator.floordiv, kind.CEIL_DIV: lambda a, b: -(-a // b)}
    expressions = ExpressionBuilder(operations)
    creator = trt.get_plugin_registry().get_creator("CompactAppendKV", "1", "medusa")
    no_fields = trt.PluginFieldCollection([])
    plugin = creator.create_plugin(
        "CompactAppendKV", "medusa", no_fields, trt.TensorRTPhase.BUILD, QuickPluginCreationRequest.STRICT_AOT
    )
    output_types = plugin.get_output_data_types([dtype for dtype, _ in inputs], [len(shape) for _, shape in inputs])
    dims = [[Expression.of(size) for size in shape] for _, shape in inputs]
    output_shapes = plugin.get_output_shapes(dims, [], expressions)

    in_out = []
    for dtype, shape in [*inputs, *(inputs[i] for i in outputs)]:
        tensor = trt.DynamicPluginTensorDesc()
        tensor.desc.dims = tuple(-1 if isinstance(size, str) else size for size in shape)
        tensor.desc.type = dtype
        tensor.desc.format = trt.TensorFormat.LINEAR
        in_out.append(tensor)
    combinations = plugin.get_supported_format_combinations(in_out, len(inputs))
    plugin.configure_plugin(in_out[: len(inputs)], in_out[len(inputs) :])
    assert plugin.get_valid_tactics() == []
    plugin.set_tactic(0)
    launch, extra = SimpleNamespace(), Setter()
    plugin.get_launch_params(dims, in_out, len(inputs), launch, extra, expressions)
    assert extra.nbSymExprs == len(extra)
    descriptions = [tensor.desc for tensor in in_out]
    name, ptx = plugin.get_kernel(descriptions[: len(inputs)], descriptions[len(inputs) :])
    return Built(
        name,
        ptx.decode(),
        output_types,
        output_shapes,
        [plugin.get_aliased_input(i) for i in range(len(outputs))],
        [(c.type, c.format) for c in combinations],
        launch,
        extra,
    )
