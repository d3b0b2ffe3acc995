"""Leave out what makes one axis of values that have one axis: the tracer does so with every index.

1. Reshape(x [n], [-1])  ->  x
"""

from __future__ import annotations

import onnx_ir as ir


class FlatReshapesPass(ir.passes.InPlacePass):
    """Rewrite each such Reshape but those that graph outputs come from."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if node.op_type == "Reshape" and _changes_nothing(node)]
        for node in nodes:
            ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
            model.graph.remove(node, safe=True)
        return ir.passes.PassResult(model, modified=bool(nodes))


def _changes_nothing(node: ir.Node) -> bool:
    values, shape = node.inputs
    if node.outputs[0].is_graph_output() or values.shape is None or len(values.shape) != 1:
        return False
    return shape.const_value is not None and shape.const_value.numpy().tolist() == [-1]
