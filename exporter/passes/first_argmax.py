"""Make every argmax the first of equals by construction: TensorRT does not say which index of equal values it gives.

1. ArgMax(x, axis)  ->  ReduceMin(Where(x = ReduceMax(x), index, last index))

Logits of fp16 and bf16 are often equal. Where all are NaN, the last index.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


class FirstArgMaxPass(ir.passes.InPlacePass):
    """Rewrite each ArgMax; the axis has a fixed size."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if (node.domain, node.op_type) == ("", "ArgMax")]
        for node in nodes:
            _rewrite(model.graph, node)
        return ir.passes.PassResult(model, modified=bool(nodes))

    def ensures(self, model: ir.Model) -> None:
        if any(node.op_type == "ArgMax" for node in model.graph):
            raise ir.passes.PostconditionError("an ArgMax is still there")


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    values, (result,) = node.inputs[0], node.outputs
    if values is None or values.shape is None:
        raise ir.passes.PassError(f"{node.name}: the shape of what it reads is not known")
    axis = node.attributes.get_int("axis", 0) % len(values.shape)
    size = values.shape[axis]
    if not isinstance(size, int):
        raise ir.passes.PassError(f"{node.name}: axis {axis} has the size {size}, which is not fixed")
    index = np.arange(size, dtype=np.int32).reshape([-1 if i == axis else 1 for i in range(len(values.shape))])
    tape = ir.tape.Tape()
    axes = tape.op("Constant", [], {"value_ints": [axis]})
    largest = tape.op("ReduceMax", [values, axes], {"keepdims": 1})
    indices = tape.op("Constant", [], {"value": ir.tensor(index)})
    last = tape.op("Constant", [], {"value": ir.tensor(np.array(size - 1, dtype=np.int32))})
    found = tape.op("Where", [tape.op("Equal", [values, largest]), indices, last])
    first = tape.op("ReduceMin", [found, axes], {"keepdims": node.attributes.get_int("keepdims", 1)})
    cast = tape.op("Cast", [first], {"to": ir.DataType.INT64}, output=ir.Value(shape=result.shape, type=result.type))
    graph.insert_before(node, tape.nodes)
    cast.name = result.name
    ir.convenience.replace_all_uses_with(result, cast, replace_graph_outputs=True)
    graph.remove(node, safe=True)
