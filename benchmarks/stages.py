"""Which stage of a round every node of an ONNX graph belongs to, told by where in the graph it lies.

The graph is the one that ONNX Runtime runs, after its own fusions, so that nodes have the names of its profiler. Every
node belongs to exactly one part, and every part to one stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

# Names of the exporter's, whose modules load torch and onnxscript.
LOGITS_OUTPUT = "logits"
OP_TYPE = "CompactAppendKV"

CACHE, BACKBONE, LM, ACCEPTANCE, HEADS, FEEDBACK = STAGES = (
    "cache append",
    "backbone",
    "LM projection",
    "acceptance",
    "heads",
    "feedback",
)
POSTERIOR, PATH, BLOCKS, TOP_K = "posterior", "path", "head blocks", "top-k"
STAGE_OF = {
    CACHE: CACHE,
    BACKBONE: BACKBONE,
    LM: LM,
    POSTERIOR: ACCEPTANCE,
    PATH: ACCEPTANCE,
    BLOCKS: HEADS,
    TOP_K: HEADS,
    FEEDBACK: FEEDBACK,
}  # part -> stage

_NEXT_STATE = {
    "next_input_ids",
    "next_position_ids",
    "next_past_length",
    "next_pending_rows",
    "next_pending_count",
}
_MOVES = {"Unsqueeze", "Squeeze", "Gather", "Reshape", "Concat", "Identity"}  # of the candidates into the next tree
_QUANTIZES = {"DynamicQuantizeLinear", "QuantizeLinear", "Cast"}


def parts_of(graph: onnx.GraphProto) -> dict[str, str]:
    """Name of every node, of the branches of an `If` too -> one of `STAGE_OF`.

    - cache append: the nodes of the compaction operator, inlined or not
    - LM projection: between the hidden rows and the logits
    - backbone: whatever else the logits depend on
    - heads: what depends on the hidden rows beside the LM projection, and what nothing else needs; `top-k` from the
      first TopK on, which may be in the branch
    - feedback: what only the state of the next pass needs, lookup too, and the moves of root and candidates into it
    - acceptance: the rest; `posterior` is what depends on the logits and not on the tree's paths

    Raises:
        RuntimeError: a node has no name of its own, or no matrix product leads to the logits; not one of our graphs.
    """
    names = [node.name for node in _all_nodes(graph.node)]
    if len(set(names)) < len(names) or "" in names:
        raise RuntimeError("the graph has nodes without a name of their own")
    return _Classified(graph).parts


class _Classified:
    def __init__(self, graph: onnx.GraphProto) -> None:
        self._nodes = list(graph.node)
        self._outputs = [value.name for value in graph.output]
        self._producers = {value: node for node in self._nodes for value in node.output if value}
        self.parts: dict[str, str] = {}
        hidden, product = self._projection()
        before = self._ancestors([LOGITS_OUTPUT])
        projection = {id(node) for node in self._users({hidden}, self._nodes) if id(node) in before}
        judged = {id(node) for node in self._users({LOGITS_OUTPUT}, self._nodes)}
        others = [node for node in self._nodes if id(node) not in projection]
        moves = self._moves()
        heads = {id(node) for node in self._users({hidden}, others)} - moves
        next_only = self._next_only(heads)
        by_path = {id(node) for node in self._users({"retrieve_indices"}, self._nodes)}
        for node in self._nodes:
            key = id(node)
            if OP_TYPE in node.op_type or OP_TYPE in node.name:
                part = CACHE
            elif key in projection or node is product:
                part = LM
            elif key in before:
                part = BACKBONE
            elif key in heads:
                part = BLOCKS
            elif key in moves or key in next_only:
                part = FEEDBACK
            else:
                part = POSTERIOR if key in judged and key not in by_path else PATH
            self._put(node, part)
        self._idle_conditions(heads, judged)
        self._split_heads()

    def _projection(self) -> tuple[str, onnx.NodeProto]:
        """The hidden rows that are projected, and the product that does it."""
        node = self._producers.get(LOGITS_OUTPUT)
        while node is not None and not ("MatMul" in node.op_type or "Gemm" in node.op_type):
            node = self._producers.get(node.input[0]) if node.input else None
        if node is None:
            raise RuntimeError(f"no matrix product leads to {LOGITS_OUTPUT!r}")
        hidden = node.input[0]
        while (source := self._producers.get(hidden)) is not None and source.op_type in _QUANTIZES:
            hidden = source.input[0]
        return hidden, node

    def _ancestors(self, values: Iterable[str]) -> set[int]:
        found: set[int] = set()
        waiting = list(values)
        while waiting:
            node = self._producers.get(waiting.pop())
            if node is not None and id(node) not in found:
                found.add(id(node))
                waiting += _inputs(node)
        return found

    @staticmethod
    def _users(values: set[str], nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
        """Those of the nodes, which are in order, that depend on one of the values."""
        known, found = set(values), []
        for node in nodes:
            if known & set(_inputs(node)):
                known |= set(node.output)
                found.append(node)
        return found

    def _moves(self) -> set[int]:
        """From the next tokens back to the root and the candidates, of a graph that has a next tree."""
        found: set[int] = set()
        if not any("tree_indices" in _inputs(node) for node in self._nodes):
            return found
        node = self._producers.get("next_input_ids")
        while node is not None and node.op_type in _MOVES:
            found.add(id(node))
            if node.op_type == "Concat":  # of root and candidates, which are chosen, not moved
                break
            node = self._producers.get(node.input[0])
        return found

    def _next_only(self, heads: set[int]) -> set[int]:
        """Nodes that nothing but the state of the next pass depends on, heads apart."""
        needed = {value for node in self._nodes if id(node) in heads for value in _inputs(node)}
        outputs = [name for name in self._outputs if name not in _NEXT_STATE]
        elsewhere = self._ancestors([*outputs, *needed])
        return {id(node) for node in self._nodes} - elsewhere - heads

    def _idle_conditions(self, heads: set[int], judged: set[int]) -> None:
        """What tells an `If` whether the heads run belongs to them: only heads use it, and no logit decides it."""
        users: dict[str, list[int]] = {}  # value -> nodes
        for node in self._nodes:
            for value in _inputs(node):
                users.setdefault(value, []).append(id(node))
        for node in reversed(self._nodes):
            using = [user for value in node.output for user in users.get(value, [])]
            beside = self.parts[node.name] in (PATH, FEEDBACK) and id(node) not in judged
            if beside and using and heads.issuperset(using):
                heads.add(id(node))
                self._put(node, BLOCKS)

    def _split_heads(self) -> None:
        ranked = False
        for node in _all_nodes(self._nodes):
            if self.parts[node.name] == BLOCKS:
                ranked = ranked or node.op_type == "TopK"
                if ranked:
                    self.parts[node.name] = TOP_K

    def _put(self, node: onnx.NodeProto, part: str) -> None:
        for one in _all_nodes([node]):
            self.parts[one.name] = part


def _inputs(node: onnx.NodeProto) -> list[str]:
    """Values that a node reads, in its branches too."""
    inner = (value for branch in _branches(node) for one in branch.node for value in _inputs(one))
    return [*(value for value in node.input if value), *inner]


def _branches(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [attribute.g for attribute in node.attribute if attribute.type == onnx.AttributeProto.GRAPH]


def _all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes and, behind each, those of its branches."""
    for node in nodes:
        yield node
        for branch in _branches(node):
            yield from _all_nodes(branch.node)
