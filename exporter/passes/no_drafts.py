"""Leave out of a graph without drafts what keeps them from one another: a plain step then costs no more for it.

1. Where(IsNaN(value), in place of NaN, key or value)  ->  key or value, before it goes into the cache (see `cache.py`)
2. ThresholdedRelu(x), which takes out NaN             ->  x
"""

from __future__ import annotations

import math

import onnx_ir as ir

from medusa_engine.plugins.compact_append_kv.body import DOMAIN, OP_TYPE

_TREE_INPUT = "retrieve_indices"  # of graphs whose rows may be drafts
NEW_ROWS = (2, 3)  # inputs of the cache node: keys and values


class NoDraftsPass(ir.passes.InPlacePass):
    """Rewrite a step graph; a round graph is left as it is. Unused nodes are left behind."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        if any(value.name == _TREE_INPUT and value.uses() for value in model.graph.inputs):
            return ir.passes.PassResult(model, modified=False)
        for node in model.graph:
            if is_cleaning(node):
                ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
            elif (node.domain, node.op_type) == (DOMAIN, OP_TYPE):
                for index in NEW_ROWS:
                    kept = node.inputs[index].producer()
                    if kept is not None and kept.op_type == "Where" and _is_nan(kept.inputs[0]):
                        node.replace_input_with(index, kept.inputs[2])
        return ir.passes.PassResult(model, modified=True)


def is_cleaning(node: ir.Node) -> bool:
    """Whether the node does no more than to take out NaN."""
    alpha = node.attributes.get_float("alpha", 1.0) if node.op_type == "ThresholdedRelu" else None
    return alpha == -math.inf


def _is_nan(value: ir.Value | None) -> bool:
    producer = None if value is None else value.producer()
    return producer is not None and producer.op_type == "IsNaN"
