"""Let a round that proposes the root alone leave the heads out: it then costs what a plain step does.

1. candidates of the heads  ->  If(tree_indices has more than one entry) then: the heads, else: zeros

What only the candidates depend on moves into the branch; its weights stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

_PROPOSAL = "next_input_ids"
_BETWEEN = ("Unsqueeze", "Gather")  # from the candidates by slot to the proposal


class IdleHeadsPass(ir.passes.InPlacePass):
    """Rewrite a round graph; a graph without heads, or whose heads have other outputs too, is left as it is."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        tree_indices = next((value for value in graph.inputs if value.name == "tree_indices"), None)
        proposal = next(value for value in graph.outputs if value.name == _PROPOSAL)
        slots = proposal.producer()  # the root and the heads' candidates, by slot
        while slots is not None and slots.op_type in _BETWEEN:
            source = slots.inputs[0]
            slots = None if source is None else source.producer()
        if tree_indices is None or slots is None or slots.op_type != "Concat" or len(slots.inputs) != 2:
            return ir.passes.PassResult(model, modified=False)
        root, candidates = slots.inputs
        kept = ancestors([root, *(value for value in graph.outputs if value is not proposal)])
        alone = ancestors([candidates]) - kept
        heads = [node for node in graph if node in alone]
        outside = (user for node in heads for value in node.outputs for user, _ in value.uses() if user not in alone)
        if candidates is None or candidates.shape is None or not heads or set(outside) != {slots}:
            return ir.passes.PassResult(model, modified=False)

        graph.remove(heads)
        tape = ir.tape.Tape()
        size = tape.op("Size", [tree_indices], output=ir.Value(name="tree_size"))
        several = tape.op("Greater", [size, tape.op("Constant", [], {"value_int": 1})])
        zeros = ir.tape.Tape()
        none = ir.Value(name="no_candidates", shape=candidates.shape, type=candidates.type)
        value = ir.tensor(np.zeros(candidates.shape.numpy(), dtype=np.int64))
        zeros.op("Constant", [], {"value": value}, output=none)
        branches = {
            "then_branch": ir.Graph([], [candidates], nodes=heads, name="heads"),
            "else_branch": ir.Graph([], [none], nodes=zeros.nodes, name="no_heads"),
        }
        proposed = ir.Value(name="candidates", shape=candidates.shape, type=candidates.type)
        tape.op("If", [several], branches, output=proposed)
        graph.insert_before(slots, tape.nodes)
        slots.replace_input_with(1, proposed)
        return ir.passes.PassResult(model, modified=True)


def ancestors(values: Iterable[ir.Value | None]) -> set[ir.Node]:
    """Nodes that the values depend on, their own producers included."""
    found: set[ir.Node] = set()
    unvisited = [value.producer() for value in values if value is not None]
    while unvisited:
        node = unvisited.pop()
        if node is not None and node not in found:
            found.add(node)
            unvisited += [value.producer() for value in node.inputs if value is not None]
    return found
