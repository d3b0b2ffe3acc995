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
        for number, (user, place) in enumerate(list(value.uses())):  # one each: it lives as long as it is needed
            tape = ir.tape.Tape()
            output = ir.Value(name=f"{value.name}_fp32_{number}")
            user.replace_input_with(place, tape.op("Cast", [value], {"to": ir.DataType.FLOAT}, output=output))
            model.graph.insert_before(user, tape.nodes)
    ir.save(model, path)


def _widen(node: ir.Node) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in _NARROW:
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(attribute.as_tensor().numpy().astype(np.float32)))
        elif (node.op_type, name) == ("Cast", "to") and attribute.as_int() in _NARROW:
            node.attributes[name] = ir.AttrInt64(name, ir.DataType.FLOAT)
