"""The graph that ONNX Runtime makes of one of ours: which of its nodes each layer has, and what is computed twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import onnxruntime as ort

from medusa_engine.exporter.graphs import LOGITS_OUTPUT


class OptimisedGraph:
    """The graph that ONNX Runtime makes of a graph file.

    Args:
        path: the file.
        folder: where it is written.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(folder / "optimised.onnx")
        options.log_severity_level = 3
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.graph = onnx.load(options.optimized_model_filepath, load_external_data=False).graph
        self.initializers = {tensor.name: tensor for tensor in self.graph.initializer}
        caches = {value.name for value in self.graph.input if value.name.startswith("past_") and "." in value.name}
        weights = {name for name, tensor in self.initializers.items() if len(tensor.dims) > 1}
        self._of_layers = caches | weights  # and what is computed from them
        for node in self.graph.node:  # in order
            if self._of_layers & set(node.input) and node.op_type != "Shape":
                self._of_layers |= set(node.output)

    def of_layers(self) -> Counter[str]:
        """Operators that depend on weights or the cache, and that the logits or the cache depend on."""
        producers = {output: node for node in self.graph.node for output in node.output}
        needed: dict[str, onnx.NodeProto] = {}
        waiting = [LOGITS_OUTPUT, *(value.name for value in self.graph.output if value.name.startswith("present_"))]
        while waiting:
            node = producers.get(waiting.pop())
            if node is not None and node.output[0] not in needed:
                needed[node.output[0]] = node
                waiting += node.input
        return Counter(node.op_type for output, node in needed.items() if output in self._of_layers)

    def computed_twice(self) -> list[str]:
        """Nodes that only sizes, positions, masks and counts decide, and that another node has computed already.

        The sizes of what weights and cache decide are one and the same in each layer.
        """
        known: dict[str, str] = {}  # value -> what it is
        seen: dict[str, str] = {}
        twice = []
        for node in self.graph.node:
            if node.op_type != "Shape" and self._of_layers & set(node.input):
                continue
            inputs = [known.get(name) or self._kind(name) for name in node.input]
            attributes = sorted(attribute.SerializeToString() for attribute in node.attribute)
            for index, output in enumerate(node.output):
                known[output] = f"{node.op_type}{attributes}{inputs}{index}"
            if known[node.output[0]] in seen:
                twice.append(f"{node.op_type} {node.name}")
            seen[known[node.output[0]]] = node.name
        return twice

    def _kind(self, name: str) -> str:
        if name in self._of_layers:
            return "rows"
        tensor = self.initializers.get(name)
        return name if tensor is None else str(onnx.numpy_helper.to_array(tensor).tolist())
