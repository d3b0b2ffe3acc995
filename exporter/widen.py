"""The graph of a narrow dtype in fp32 over the weights as they are stored: what is left is what it computes.

1. an initializer of fp16 or bf16  ->  Cast(initializer)
2. every other value, constant and cast of these types  ->  the same in fp32
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def write_widened(graph: Path, path: Path) -> None:
    """Write the widened form of a graph file into the same folder; the weights stay where they are."""
    model = ir.load(graph)
    narrow = [value for value in model.graph.initializers.values() if value.dtype in _NARROW]
    for node in model.graph:
        _widen(node)
    for value in [*model.graph.inputs, *(output for node in model.graph for output in node.outputs)]:
        if value.dtype in _NARROW:
            value.type = ir.TensorType(ir.DataType.FLOAT)
    for value in narrow:
        for user, place in list(value.uses()):
            tape = ir.tape.Tape()
            stored = _behind(value, _activation(user), tape)
            user.replace_input_with(place, tape.op("Cast", [stored], {"to": ir.DataType.FLOAT}))
            model.graph.insert_before(user, tape.nodes)
    model.graph.sort()
    ir.save(model, path)


def _activation(user: ir.Node) -> ir.Value | None:
    """What a node, or the one behind a transposition, computes with beside a weight."""
    given = (value for value in user.inputs if value is not None and not value.is_initializer())
    if found := next((value for value in given if value.shape), None):
        return found
    behind = user.outputs[0].uses() if user.op_type == "Transpose" else ()
    return next((_activation(node) for node, _ in behind), None)


def _behind(weight: ir.Value, activation: ir.Value | None, tape: ir.tape.Tape) -> ir.Value:
    """The weight, to be had once an activation is there: ONNX Runtime would widen all weights before it begins."""
    if activation is None or weight.shape is None:
        return weight
    nothing = tape.op("Mul", [tape.op("Shape", [activation], {"end": 1}), tape.op("Constant", [], {"value_int": 0})])
    sizes = tape.op("Constant", [], {"value_ints": weight.shape.numpy()})
    return tape.op("Reshape", [weight, tape.op("Add", [sizes, nothing])])


def _widen(node: ir.Node) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in _NARROW:
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(attribute.as_tensor().numpy().astype(np.float32)))
        elif (node.op_type, name) == ("Cast", "to") and attribute.as_int() in _NARROW:
            node.attributes[name] = ir.AttrInt64(name, ir.DataType.FLOAT)
