"""Compute projections of the same rows in one product.

1. x @ a, x @ b, x @ c  ->  Split(x @ [a | b | c])

Queries, keys and values are such a group, gate and up projection another. One wide product reads x once, spreads
better over threads, and under int8 its rows are quantised once.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import onnx_ir as ir


class FuseProjectionsPass(ir.passes.InPlacePass):
    """Rewrite every group of two or more; biases behind the products stay where they are."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        groups: dict[tuple[ir.Value, int], list[ir.Node]] = defaultdict(list)
        for node in graph:
            rows, weight = projection(node)
            if rows is not None and weight is not None:
                groups[rows, weight.shape[0]].append(node)
        several = [(rows, nodes) for (rows, _), nodes in groups.items() if len(nodes) > 1]
        for rows, nodes in several:
            _fuse(graph, rows, nodes)
        return ir.passes.PassResult(model, modified=bool(several))


def projection(node: ir.Node) -> tuple[ir.Value | None, ir.TensorProtocol | None]:
    """The rows [..., K] and the constant weight [K, N] of `rows @ weight`; None, None for any other node."""
    if node.op_type != "MatMul" or node.domain != "":
        return None, None
    rows, weight = node.inputs
    if weight is None or weight.const_value is None or len(weight.const_value.shape) != 2:
        return None, None
    return rows, weight.const_value


def _fuse(graph: ir.Graph, rows: ir.Value, nodes: list[ir.Node]) -> None:
    weights = [node.inputs[1].const_value.numpy() for node in nodes]
    fused = ir.Value(name=f"{nodes[0].inputs[1].name}.fused", const_value=ir.tensor(np.concatenate(weights, axis=1)))
    fused.shape, fused.dtype = fused.const_value.shape, fused.const_value.dtype
    graph.register_initializer(fused)
    outputs = [node.outputs[0] for node in nodes]
    tape = ir.tape.Tape()
    shape = None if outputs[0].shape is None else [*outputs[0].shape[:-1], fused.shape[1]]
    product = ir.Value(name=f"{outputs[0].name}.fused", shape=ir.Shape(shape) if shape else None, type=outputs[0].type)
    tape.op("MatMul", [rows, fused], output=product)
    sizes = tape.op("Constant", [], {"value_ints": [weight.shape[1] for weight in weights]})
    split = ir.Node("", "Split", [product, sizes], [ir.AttrInt64("axis", -1)], num_outputs=len(nodes))
    graph.insert_before(nodes[0], [*tape.nodes, split])
    for old, new in zip(outputs, split.outputs, strict=True):
        new.shape, new.type = old.shape, old.type
        ir.convenience.replace_all_uses_with(old, new)
        new.name = f"{old.name}.part"
    graph.remove(nodes, safe=True)
