"""Leave out of a graph without drafts what keeps them from one another: a plain step then costs no more for it.

1. Where(IsNaN(value), in place of NaN, key or value)  ->  key or value, before it goes into the cache (see `cache.py`)
2. ThresholdedRelu(key or value)                       ->  the same
"""

from __future__ import annotations

import onnx_ir as ir

from medusa_engine.plugins.compact_append_kv.body import DOMAIN, OP_TYPE

_TREE_INPUT = "retrieve_indices"  # of graphs whose rows may be drafts
_NEW_ROWS = (2, 3)  # inputs of the cache node: keys and values
_REPLACED = {"Where": 2, "ThresholdedRelu": 0}  # which of its inputs goes through


class NoDraftsPass(ir.passes.InPlacePass):
    """Rewrite a step graph; a round graph is left as it is. Unused nodes are left behind."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        if any(value.name == _TREE_INPUT and value.uses() for value in model.graph.inputs):
            return ir.passes.PassResult(model, modified=False)
        for node in model.graph:
            if (node.domain, node.op_type) == (DOMAIN, OP_TYPE):
                for index in _NEW_ROWS:
                    new = node.inputs[index]
                    kept = None if new is None else new.producer()
                    assert kept is not None and kept.op_type in _REPLACED
                    node.replace_input_with(index, kept.inputs[_REPLACED[kept.op_type]])
        return ir.passes.PassResult(model, modified=True)
