"""Let a round whose next tree asks for no head's token leave the heads out, and so for lookup.

1. candidates of the heads  ->  If(tree_indices has one of their slots) then: the heads, else: zeros
2. candidates of lookup     ->  the same

A round that proposes the root alone then costs what a plain step does. What only the candidates depend on moves into
the branch; its weights stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

_PROPOSAL = "next_input_ids"
_BETWEEN = ("Unsqueeze", "Gather")  # from the candidates by slot to the proposal


class IdleHeadsPass(ir.passes.InPlacePass):
    """Rewrite a round graph; heads that have other outputs too are left as they are, as is a graph without any."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        tree_indices = next((value for value in graph.inputs if value.name == "tree_indices"), None)
        proposal = next(value for value in graph.outputs if value.name == _PROPOSAL)
        slots = proposal.producer()  # the root and the candidates, by slot
        while slots is not None and slots.op_type in _BETWEEN:
            source = slots.inputs[0]
            slots = None if source is None else source.producer()
        if tree_indices is None or slots is None or slots.op_type != "Concat":
            return ir.passes.PassResult(model, modified=False)
        begin, modified = 1, False  # slot 0 is the root's
        for index, candidates in enumerate(slots.inputs):
            if index == 0 or candidates is None or candidates.shape is None:
                continue
            end = begin + int(candidates.shape.numpy()[0])
            others = (value for value in (*slots.inputs, *graph.outputs) if value not in (candidates, proposal))
            alone = ancestors([candidates]) - ancestors(others)
            nodes = [node for node in graph if node in alone]
            outside = {user for node in nodes for value in node.outputs for user, _ in value.uses()} - alone
            if nodes and outside == {slots}:
                graph.remove(nodes)
                last = index == len(slots.inputs) - 1
                _insert_branches(graph, tree_indices, (begin, None if last else end), nodes, slots, index)
                modified = True
            begin = end
        return ir.passes.PassResult(model, modified=modified)


def _insert_branches(
    graph: ir.Graph,
    tree_indices: ir.Value,
    own: tuple[int, int | None],
    nodes: list[ir.Node],
    slots: ir.Node,
    index: int,
) -> None:
    """Let input `index` of `slots`, which `nodes` compute, be zeros where no tree index is in the range `own`.

    None is the end of all slots.
    """
    candidates = slots.inputs[index]
    assert candidates is not None and candidates.shape is not None
    tape = ir.tape.Tape()
    begin, end = own
    inside = tape.op("GreaterOrEqual", [tree_indices, tape.op("Constant", [], {"value_int": begin})])
    if end is not None:
        below = tape.op("Less", [tree_indices, tape.op("Constant", [], {"value_int": end})])
        inside = tape.op("And", [inside, below])
    wanted = tape.op("ReduceMax", [inside], {"keepdims": 0})
    zeros = ir.tape.Tape()
    none = ir.Value(name=f"no_candidates.{index}", shape=candidates.shape, type=candidates.type)
    value = ir.tensor(np.zeros(candidates.shape.numpy(), dtype=np.int64))
    zeros.op("Constant", [], {"value": value}, output=none, name=f"nothing.{index}")
    branches = {
        "then_branch": ir.Graph([], [candidates], nodes=nodes, name=f"proposer.{index}"),
        "else_branch": ir.Graph([], [none], nodes=zeros.nodes, name=f"nothing.{index}"),
    }
    proposed = ir.Value(name=f"candidates.{index}", shape=candidates.shape, type=candidates.type)
    tape.op("If", [wanted], branches, output=proposed)
    graph.insert_before(slots, tape.nodes)
    slots.replace_input_with(index, proposed)


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
