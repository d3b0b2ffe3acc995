"""Take NaN of drafts out of keys and values before they are cut apart: one node per layer in place of two.

1. Split(product): key  ->  [RMSNormalization]  ->  [RotaryEmbedding]  ->  ThresholdedRelu, value  ->  ThresholdedRelu
   becomes Split(ThresholdedRelu(product)) without the others (see `cache.py`)

Queries lose their NaN, too; the row's hidden state keeps it, and so its logits do.
"""

from __future__ import annotations

import onnx_ir as ir

from medusa_engine.exporter.passes.nan_of_drafts import NEW_ROWS, cache_nodes, is_cleaning, keeps_zero


class OneCleaningPass(ir.passes.InPlacePass):
    """Rewrite behind `SplitHeadsPass`; layers where keys or values come otherwise are left as they are."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in list(cache_nodes(model.graph)):
            cleanings = [node.inputs[index].producer() for index in NEW_ROWS]
            splits = {_split(cleaning) for cleaning in cleanings}
            if len(splits) == 1 and (split := splits.pop()) is not None:
                _clean(model.graph, split)
                for index, cleaning in zip(NEW_ROWS, cleanings, strict=True):
                    node.replace_input_with(index, cleaning.inputs[0])
                model.graph.remove(cleanings, safe=True)
                modified = True
        return ir.passes.PassResult(model, modified=modified)


def _split(cleaning: ir.Node | None) -> ir.Node | None:
    """Where the rows were cut from the product that this node cleans; None if they come otherwise."""
    if cleaning is None or not is_cleaning(cleaning) or len(cleaning.outputs[0].uses()) > 1:
        return None
    node = cleaning.inputs[0].producer()
    while node is not None and keeps_zero(node):
        node = node.inputs[0].producer()
    return node if node is not None and node.op_type == "Split" else None


def _clean(graph: ir.Graph, split: ir.Node) -> None:
    product = split.inputs[0]
    tape = ir.tape.Tape()
    clean = ir.Value(name=f"{product.name}.clean", shape=product.shape, type=product.type)
    tape.op("ThresholdedRelu", [product], {"alpha": -float("inf")}, output=clean)
    graph.insert_before(split, tape.nodes)
    split.replace_input_with(0, clean)
