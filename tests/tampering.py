"""Copies of a bundle with a fault in them, whose manifest says that all is well."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from medusa_engine.runtime.manifest import document_sha256, file_sha256


class Tampered:
    """A copy of a bundle; `seal` it before use."""

    def __init__(self, bundle: Path, folder: Path) -> None:
        shutil.copytree(bundle, folder)
        self.folder = folder

    def graph(self, edit: Callable[[onnx.GraphProto, Any], None], name: str = "round") -> Tampered:
        """Change a graph; the functions of its model are given, too."""
        path = self.folder / f"{name}.onnx"
        model = onnx.load(path, load_external_data=False)
        edit(model.graph, model.functions)
        path.write_bytes(model.SerializeToString())
        return self

    def weight(self, name: str, edit: Callable[[npt.NDArray[np.float32]], None]) -> Tampered:
        """Change an initializer of weights.bin in place."""
        graph = onnx.load(self.folder / "round.onnx", load_external_data=False).graph
        (tensor,) = (tensor for tensor in graph.initializer if tensor.name == name)
        offset = int(next(entry.value for entry in tensor.external_data if entry.key == "offset"))
        values = np.memmap(self.folder / "weights.bin", np.float32, "r+", offset, shape=tuple(tensor.dims))
        edit(values)
        values.flush()
        return self

    def seal(self) -> Path:
        """Write sizes and hashes anew."""
        path = self.folder / "manifest.json"
        document = json.loads(path.read_text())
        for name in document["files"]:
            file = self.folder / name
            document["files"][name] = {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
        del document["sha256"]
        path.write_text(json.dumps(document | {"sha256": document_sha256(document)}))
        return self.folder


def positions_by_row(graph: onnx.GraphProto, _functions: Any) -> None:
    """Rotate by packed row order instead of depth: a prompt is not affected, siblings are."""
    nodes = [
        helper.make_node("Constant", [], ["zero"], value_int=0),
        helper.make_node("Constant", [], ["one"], value_int=1),
        helper.make_node("Size", ["position_ids"], ["row_count"]),
        helper.make_node("Range", ["zero", "row_count", "one"], ["by_row"]),
        helper.make_node("Gather", ["position_ids", "zero"], ["first_positions"], axis=1),  # [1]
        helper.make_node("Add", ["by_row", "first_positions"], ["positions"]),
        helper.make_node("Unsqueeze", ["positions", "axis_0"], ["rotated_position_ids"]),
    ]
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "axis_0"))
    for node in graph.node:
        if node.op_type == "Unsqueeze" and node.input[0] == "position_ids":
            node.input[0] = "rotated_position_ids"
    _put_first(graph, nodes)


def causal_mask(graph: onnx.GraphProto, _functions: Any) -> None:
    """Let siblings see those before them."""
    for node in graph.node:
        if node.op_type == "Gather" and node.input[0] == "tree_mask":
            node.input[0] = "causal_mask"
    nodes = [
        helper.make_node("Cast", ["tree_mask"], ["mask_numbers"], to=onnx.TensorProto.INT32),
        helper.make_node("Mul", ["mask_numbers", "no_number"], ["mask_zeros"]),
        helper.make_node("Add", ["mask_zeros", "one_number"], ["mask_ones"]),
        helper.make_node("Trilu", ["mask_ones"], ["mask_triangle"], upper=0),
        helper.make_node("Cast", ["mask_triangle"], ["causal_mask"], to=onnx.TensorProto.BOOL),
    ]
    for name, value in (("no_number", 0), ("one_number", 1)):
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(value, dtype=np.int32), name))
    _put_first(graph, nodes)


def nothing_accepted(graph: onnx.GraphProto, _functions: Any) -> None:
    """Let no draft match what was chosen before it."""
    match = next(node for node in graph.node if node.op_type == "Equal")
    (both,) = (node for node in graph.node if node.op_type == "And" and match.output[0] in node.input)
    both.op_type = "Xor"  # of the same value twice: never
    both.input[0] = both.input[1] = match.output[0]


def least_likely(graph: onnx.GraphProto, _functions: Any) -> None:
    """Choose the token with the smallest logit."""
    next(node for node in graph.node if node.op_type == "ArgMax" and node.input[0] == "logits").op_type = "ArgMin"


def other_tokens(graph: onnx.GraphProto, _functions: Any) -> None:
    """Publish each token's successor in the vocabulary."""
    (node,) = (node for node in graph.node if "accepted_tokens" in node.output)
    node.output[0] = "tokens_of_path"
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(1), "one_token"))
    graph.node.append(helper.make_node("Add", ["tokens_of_path", "one_token"], ["accepted_tokens"]))


def rows_left_behind(_graph: onnx.GraphProto, functions: Any) -> None:
    """Commit the first staged rows, whichever were accepted."""
    nodes = functions[0].node
    adds = [(at, node) for at, node in enumerate(nodes) if node.op_type == "Add" and "pending_rows" in node.input]
    ((place, source),) = adds
    source.input[list(source.input).index("pending_rows")] = "first_rows"
    added = [
        helper.make_node("Constant", [], ["first_row"], value_int=0),
        helper.make_node("Constant", [], ["next_row"], value_int=1),
        helper.make_node("Size", ["pending_rows"], ["row_slots"]),
        helper.make_node("Range", ["first_row", "row_slots", "next_row"], ["first_rows"]),
    ]
    for offset, node in enumerate(added):
        nodes.insert(place + offset, node)


def nothing_looked_up(graph: onnx.GraphProto, _functions: Any) -> None:
    """Find no earlier occurrence of anything: the last token is repeated."""
    branches = [attribute.g for node in graph.node if node.op_type == "If" for attribute in node.attribute]
    (best,) = (node for branch in branches for node in branch.node if node.op_type == "ReduceMax")
    best.op_type = "ReduceMin"


def _put_first(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    for place, node in enumerate(nodes):
        graph.node.insert(place, node)
