"""Store each residual block of the heads as its product reads it, and let the first ones be one product.

1. Gather(w [K, layers, H, H], layer, axis=1)  ->  the block [K, H, H]; the tracer does so itself if it is small
2. Expand(x [1, 1, H], [K, 1, H]) @ block [K, H, H]
   becomes Reshape(x @ block', [K, 1, H]), block' [H, K * H]

All heads begin with the same row. One wide product spreads better over threads than K narrow ones.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt
import onnx_ir as ir


class HeadBlocksPass(ir.passes.InPlacePass):
    """Rewrite what the heads read of their weights; a model without heads is left as it is."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        products: dict[ir.Value, list[ir.Node]] = defaultdict(list)  # by what they multiply with
        for node in graph:
            if node.op_type == "MatMul":
                products[node.inputs[1]].append(node)
        modified = False
        for source, nodes in products.items():
            block = _block(source)
            if block is None:
                continue
            modified = True
            rows = [_shared_row(node) for node in nodes]
            heads, size, _ = block.shape
            first = None not in rows
            stored = block.transpose(1, 0, 2).reshape(size, heads * size) if first else block
            weight = ir.Value(name=f"{source.name}.block", const_value=ir.tensor(np.ascontiguousarray(stored)))
            weight.shape, weight.dtype = weight.const_value.shape, weight.const_value.dtype
            graph.register_initializer(weight)
            for node, row in zip(nodes, rows, strict=True):
                if first:
                    _in_one_product(graph, node, row, weight, heads)
                else:
                    node.replace_input_with(1, weight)
        return ir.passes.PassResult(model, modified=modified)


def _block(weight: ir.Value | None) -> npt.NDArray[np.floating] | None:
    """[K, H, H] weights of one block of all heads; None if the value is something else."""
    if weight is not None and weight.const_value is not None and len(weight.const_value.shape) == 3:
        _, rows, columns = weight.const_value.shape
        return weight.const_value.numpy() if rows == columns else None
    gather = None if weight is None else weight.producer()
    if gather is None or gather.op_type != "Gather" or gather.attributes.get_int("axis", 0) != 1:
        return None
    whole, layer = (value.const_value for value in gather.inputs)
    if whole is None or layer is None or len(whole.shape) != 4 or len(layer.shape) != 0:
        return None
    return whole.numpy()[:, int(layer.numpy())]


def _shared_row(product: ir.Node) -> ir.Value | None:
    """[1, 1, H] that the product reads once for each head; None if each has rows of its own."""
    expand = product.inputs[0].producer()
    if expand is None or expand.op_type != "Expand":
        return None
    row = expand.inputs[0]
    return row if row.shape is not None and row.shape[:2] == (1, 1) else None


def _in_one_product(graph: ir.Graph, node: ir.Node, row: ir.Value, weight: ir.Value, heads: int) -> None:
    (old,) = node.outputs
    tape = ir.tape.Tape()
    shape = ir.Value(name=f"{old.name}.shape", shape=ir.Shape([3]), type=ir.TensorType(ir.DataType.INT64))
    tape.op("Constant", [], {"value_ints": [heads, 1, -1]}, output=shape)
    output = ir.Value(name=old.name, shape=old.shape, type=old.type)
    wide = ir.Value(name=f"{old.name}.wide", shape=ir.Shape([1, 1, weight.shape[1]]), type=old.type)
    tape.op("Reshape", [tape.op("MatMul", [row, weight], output=wide), shape], output=output)
    graph.insert_before(node, tape.nodes)
    ir.convenience.replace_all_uses_with(old, output)
    graph.remove(node, safe=True)
