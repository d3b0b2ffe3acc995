"""Leave out of a graph without drafts what keeps them from one another: a plain step then costs no more for it.

1. Where(IsNaN(x), in place of NaN, x)  ->  x, on the way of keys and values into the cache (see `cache.py`)
2. ThresholdedRelu(x)                   ->  x, there
"""

from __future__ import annotations

import onnx_ir as ir

from medusa_engine.exporter.passes.nan_of_drafts import NEW_ROWS, cache_nodes, uncleaned

_TREE_INPUT = "retrieve_indices"  # of graphs whose rows may be drafts


class NoDraftsPass(ir.passes.InPlacePass):
    """Rewrite a step graph; a round graph is left as it is. Unused nodes are left behind."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        if any(value.name == _TREE_INPUT and value.uses() for value in model.graph.inputs):
            return ir.passes.PassResult(model, modified=False)
        rows = [node.inputs[index] for node in cache_nodes(model.graph) for index in NEW_ROWS]
        for cleaned, source in {uncleaned(value) for value in rows}:  # one may stand before keys and values
            ir.convenience.replace_all_uses_with(cleaned, source)
        return ir.passes.PassResult(model, modified=True)
