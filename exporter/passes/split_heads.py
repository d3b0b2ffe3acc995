"""Cut the product of queries, keys and values into heads at once.

1. Split(product)  ->  for each part: [+ bias]  ->  Reshape  ->  [RMSNormalization]  ->  Transpose
   becomes Split(Transpose(Reshape(product [+ biases])))  ->  [RMSNormalization]

Where every part goes this way: with norms of queries and keys, or without.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

_HEADS_FIRST = (0, 2, 1, 3)  # [1, N, H, head_dim] -> [1, H, N, head_dim]


class SplitHeadsPass(ir.passes.InPlacePass):
    """Rewrite behind `FuseProjectionsPass`; what is cut otherwise is left as it is."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in [node for node in model.graph if node.op_type == "Split" and node.domain == ""]:
            parts = [_part(value) for value in node.outputs]
            if found := [part for part in parts if part is not None]:
                alike = len({(part.head_dim, part.bias is None) for part in found}) == 1
                if len(found) == len(parts) and alike:
                    _rewrite(model.graph, node, found)
                    modified = True
        return ir.passes.PassResult(model, modified=modified)


class _Part(NamedTuple):
    heads: int
    head_dim: int
    bias: ir.Value | None  # [heads * head_dim]
    norm: ir.Node | None
    transpose: ir.Node


def _part(value: ir.Value) -> _Part | None:
    """The way of a part of the product; None if it is not that of the rule."""
    node, bias, norm = _only_user(value), None, None
    if node is not None and node.op_type == "Add":
        bias = node.inputs[1] if node.inputs[0] is value else node.inputs[0]
        if bias is None or bias.const_value is None or len(bias.const_value.shape) != 1:
            return None
        node = _only_user(node.outputs[0])
    if node is None or node.op_type != "Reshape":
        return None
    shape = node.outputs[0].shape
    if shape is None or len(shape) != 4 or not isinstance(shape[2], int) or not isinstance(shape[3], int):
        return None
    node = _only_user(node.outputs[0])
    if node is not None and node.op_type == "RMSNormalization" and node.attributes.get_int("axis", -1) in (-1, 3):
        node, norm = _only_user(node.outputs[0]), node
    if node is None or node.op_type != "Transpose" or tuple(node.attributes.get_ints("perm", ())) != _HEADS_FIRST:
        return None
    return _Part(shape[2], shape[3], bias, norm, node)


def _only_user(value: ir.Value) -> ir.Node | None:
    users = list(value.uses())
    return users[0][0] if len(users) == 1 and not value.is_graph_output() else None


def _rewrite(graph: ir.Graph, split: ir.Node, parts: list[_Part]) -> None:
    product = split.inputs[0]
    assert product is not None
    heads, head_dim = [part.heads for part in parts], parts[0].head_dim
    tape = ir.tape.Tape()
    biases = [part.bias for part in parts if part.bias is not None]
    if biases:
        values = np.concatenate([bias.const_value.numpy() for bias in biases])
        fused = ir.Value(name=f"{biases[0].name}.fused", const_value=ir.tensor(values))
        fused.shape, fused.dtype = fused.const_value.shape, fused.const_value.dtype
        graph.register_initializer(fused)
        biased = ir.Value(name=f"{product.name}.biased", shape=product.shape, type=product.type)
        product = tape.op("Add", [product, fused], output=biased)
    sizes = tape.op("Constant", [], {"value_ints": [1, -1, sum(heads), head_dim]})
    by_head = tape.op("Transpose", [tape.op("Reshape", [product, sizes])], {"perm": _HEADS_FIRST})
    counts = tape.op("Constant", [], {"value_ints": heads})
    cut = ir.Node("", "Split", [by_head, counts], [ir.AttrInt64("axis", 1)], num_outputs=len(parts))
    graph.insert_before(split, [*tape.nodes, cut])
    for part, new in zip(parts, cut.outputs, strict=True):
        old = part.transpose.outputs[0]
        new.name, new.shape, new.type = f"{old.name}.heads", old.shape, old.type
        if part.norm is not None:
            part.norm.replace_input_with(0, new)
            normed = part.norm.outputs[0]
            normed.shape = old.shape
            ir.convenience.replace_all_uses_with(old, normed)
        else:
            ir.convenience.replace_all_uses_with(old, new)
