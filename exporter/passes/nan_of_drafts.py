"""Where a graph takes NaN out of keys and values before they go into the cache (see `cache.py`)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from medusa_engine.plugins.compact_append_kv.body import DOMAIN, OP_TYPE

NEW_ROWS = (2, 3)  # inputs of the cache node: keys and values


def cache_nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    return (node for node in graph if (node.domain, node.op_type) == (DOMAIN, OP_TYPE))


def is_cleaning(node: ir.Node) -> bool:
    """Whether the node does no more than to take out NaN: ThresholdedRelu(x) above -inf."""
    alpha = node.attributes.get_float("alpha", 1.0) if node.op_type == "ThresholdedRelu" else None
    return alpha == -math.inf


def keeps_zero(node: ir.Node) -> bool:
    """Whether rows of 0 stay 0: norms, with an epsilon, and rotations."""
    if node.op_type == "RMSNormalization":
        return node.attributes.get_float("epsilon", 1e-5) > 0
    return node.op_type == "RotaryEmbedding"


def uncleaned(rows: ir.Value | None) -> tuple[ir.Value, ir.Value]:
    """What took NaN out of keys or values, and what it was taken out of.

    Raises:
        AssertionError: nothing did.
    """
    node = None if rows is None else rows.producer()
    while node is not None and (keeps_zero(node) or node.op_type == "Split"):
        node = node.inputs[0].producer()
    assert node is not None, "keys or values come from an input of the graph"
    if is_cleaning(node):
        return node.outputs[0], node.inputs[0]
    condition = node.inputs[0].producer() if node.op_type == "Where" else None
    assert condition is not None and condition.op_type == "IsNaN", f"{node.op_type} leaves NaN in keys or values"
    return node.outputs[0], node.inputs[2]
