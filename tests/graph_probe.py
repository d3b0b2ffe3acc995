"""An exported round graph with inner values as outputs or inputs, run pass by pass with a cache of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import helper

from medusa_engine.exporter.graphs import LOGITS_OUTPUT
from medusa_engine.runtime.manifest import Limits, graph_name, read_manifest
from medusa_engine.runtime.policy import GREEDY
from medusa_engine.runtime.tree_buffers import TreeBuffers

HIDDEN = "hidden"
UNLIMITED = 1000  # tokens of a budget that ends nothing

Ints = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[Any]]


@dataclass
class Pending:
    """P, and the packed rows of the last pass that the next one commits."""

    past_length: int
    rows: list[int]

    @property
    def staged(self) -> int:
        """Cache row and, in these tests, position of the next pass's first row."""
        return self.past_length + len(self.rows)


class RoundProbe:
    """A round graph, or a step, that also outputs the logits of all rows and the final hidden states.

    Args:
        folder: the bundle.
        given_logits: take `logits` as an input instead of computing them, so that a test chooses the predictions.
        policy: of acceptance.
        kind: "round" or "step".
    """

    def __init__(self, folder: Path, *, given_logits: bool = False, policy: str = GREEDY, kind: str = "round") -> None:
        self.limits: Limits = read_manifest(folder).limits
        model = onnx.load(folder / f"{graph_name(kind, policy)}.onnx", load_external_data=False)
        graph = model.graph
        float_ = onnx.TensorProto.FLOAT
        hidden = [node for node in graph.node if node.op_type == "RMSNormalization"][-1].output[0]
        graph.node.append(helper.make_node("Identity", [hidden], [HIDDEN]))
        graph.output.append(helper.make_tensor_value_info(HIDDEN, float_, None))
        logits = helper.make_tensor_value_info(LOGITS_OUTPUT, float_, ["R", self.limits.vocab_size])
        if given_logits:
            (producer,) = (node for node in graph.node if LOGITS_OUTPUT in node.output)
            producer.output[0] = "computed_logits"
            graph.input.append(logits)
        else:
            graph.output.append(logits)
        options = ort.SessionOptions()
        options.log_severity_level = 3  # it would warn that these runs copy the cache
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # torch runs between the passes
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
        self._session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self._inputs = {value.name for value in self._session.get_inputs()}
        self._outputs = [value.name for value in self._session.get_outputs()]
        self._cache: Arrays = {}
        self.reset()

    def reset(self) -> None:
        """Empty the cache."""
        limits = self.limits
        shape = (1, limits.kv_heads, limits.cache_rows, limits.head_dim)
        names = (f"{kind}.{layer}" for kind in ("key", "value") for layer in range(limits.layers))
        self._cache = {f"past_{name}": np.zeros(shape, dtype=np.float32) for name in names}

    def run(
        self,
        tokens: npt.ArrayLike,
        pending: Pending,
        tree: TreeBuffers,
        *,
        next_tree: TreeBuffers | None = None,
        keep_cache: bool = True,
        **replaced: npt.NDArray[Any],
    ) -> Arrays:
        """One pass over `tree`.

        Args:
            tokens: [N] packed tokens.
            pending: what the pass commits first.
            next_tree: the tree that is proposed; `tree` if None.
            keep_cache: False leaves the cache as it was.
            replaced: inputs that differ from those of `tree`, by name.

        Returns:
            Every output by name, `logits` [N, V] and `hidden` [N, H] among them.
        """
        depth = self.limits.depth
        inputs: Arrays = {
            "input_ids": np.asarray(tokens, dtype=np.int64)[None],
            "position_ids": (pending.staged + tree.position_offsets)[None],
            "tree_mask": tree.tree_mask,
            "logit_rows": np.arange(len(tree.tree_indices)),
            "retrieve_indices": tree.retrieve_indices,
            "tree_indices": (next_tree or tree).tree_indices,
            "past_length": np.array([pending.past_length]),
            "pending_rows": np.array([*pending.rows, *[0] * (depth + 1 - len(pending.rows))], dtype=np.int64),
            "pending_count": np.array([len(pending.rows)]),
            "stop_ids": np.zeros(0, dtype=np.int64),
            "token_budget": np.array([UNLIMITED]),
            "finished": np.array([False]),
            # says nothing but what lookup proposes
            "history": np.zeros(pending.staged + tree.position_offsets[tree.retrieve_indices[0, 0]], dtype=np.int64),
        }
        inputs |= replaced | self._cache
        outputs = self._session.run(self._outputs, {name: inputs[name] for name in inputs if name in self._inputs})
        values = dict(zip(self._outputs, outputs, strict=True))
        values[HIDDEN] = values[HIDDEN][0]
        if keep_cache:
            self._cache = {name: values[name.replace("past", "present")] for name in self._cache}
        return values


def chunk_buffers(rows: int, depth: int) -> TreeBuffers:
    """The buffers of a prompt chunk: one path that begins at its last row."""
    retrieve_indices = np.full((1, depth + 1), -1, dtype=np.int64)
    retrieve_indices[0, 0] = rows - 1
    return TreeBuffers(
        tree_mask=np.tri(rows, dtype=np.bool_),
        position_offsets=np.arange(rows),
        tree_indices=np.zeros(rows, dtype=np.int64),
        retrieve_indices=retrieve_indices,
    )
