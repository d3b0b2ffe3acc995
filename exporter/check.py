"""Run the exported round beside transformers before the bundle is put in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import torch

from medusa_engine.exporter.round_shape import RoundShape
from medusa_engine.exporter.trace import cache_names
from medusa_engine.exporter.widen import write_widened
from medusa_engine.runtime.errors import UserError

# fp32 logits of two correct implementations differ by rounding only; a wrong row or position by far more. A graph of a
# narrow dtype holds constants that are rounded to it.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 3e-3, torch.bfloat16: 1e-2}
# Of a graph that computes in fp16, whose numbers have 11 bits, from fp32, behind many layers.
FP16_TOLERANCE = 3e-2
CHUNK_TOKENS = 16
BRANCH_TOKENS = 6

Int64Array = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Reference:
    """Passes, and what transformers' own eager attention makes of them.

    A prompt chunk, then a tree behind it. The tree has a root and two branches of equal positions, so that rows,
    positions and the cache of the earlier pass all show in the logits.

    Attributes:
        architecture: the model's class.
        passes: input_ids [N], position_ids [N] and tree_mask [N, N] of each pass; the last row is accepted.
        logits: [rows, V] of the rows of all passes, computed in fp32 from the weights in their own dtype.
    """

    architecture: str
    passes: list[tuple[Int64Array, Int64Array, npt.NDArray[np.bool_]]]
    logits: Logits


def reference_logits(model: Any, shape: RoundShape) -> Reference:
    """The reference for a model and the sizes of its round: where the cache is short, fewer rows.

    Raises:
        UserError: transformers' logits are NaN.
    """
    room = shape.cache_rows - shape.depth - 1 - (shape.max_tree_nodes if shape.fixed else 0)
    chunk = min(CHUNK_TOKENS, max(1, room - 1))
    branch = max(0, min(BRANCH_TOKENS, (room - chunk - 1) // 2))
    tokens = np.random.default_rng(0).integers(0, shape.vocab_size, size=chunk + 1 + 2 * branch)
    behind_root = chunk + 1
    branches = tokens[behind_root : behind_root + branch], tokens[behind_root + branch :]
    one, other = (_transformers_logits(model, np.concatenate([tokens[:behind_root], path])) for path in branches)
    if np.isnan(one).any() or np.isnan(other).any():
        raise UserError(
            f"{type(model).__name__}: the model's own logits are NaN in transformers",
            "check the checkpoint: weights that are NaN or infinite cannot be decoded with",
        )
    passes = [(tokens[:chunk], np.arange(chunk), np.tri(chunk, dtype=np.bool_))]
    expected = [one[:chunk]]
    if chunk < room:
        depths = np.concatenate([[0], *[np.arange(1, branch + 1)] * 2])
        mask = np.zeros((1 + 2 * branch, 1 + 2 * branch), dtype=np.bool_)
        mask[:, 0] = True
        for start in (1, 1 + branch):
            mask[start : start + branch, start : start + branch] = np.tri(branch, dtype=np.bool_)
        passes.append((tokens[chunk:], chunk + depths, mask))
        expected += [one[chunk:], other[behind_root:]]
    return Reference(type(model).__name__, passes, np.concatenate(expected))


def check_logits(reference: Reference, graph: Path, shape: RoundShape) -> float:
    """Compare the logits of a graph with those of the reference.

    A graph of fp16 or bf16 is compared in fp32, over its own weights, almost as strictly. One of fp16 is then
    run as it is, too; bf16, which has the range of fp32, ONNX Runtime does not compute.

    Args:
        graph: a round graph that outputs its logits too; a file beside it is written and goes again.

    Returns:
        The largest difference in fp32, relative to the largest logit.

    Raises:
        UserError: a difference is more than `TOLERANCES` allow, or in fp16 more than `FP16_TOLERANCE`.
    """
    wide = graph
    if shape.dtype != torch.float32:
        wide = graph.with_suffix(".fp32.onnx")
        write_widened(graph, wide)
    difference = _difference(reference, wide, shape, np.float32)
    if not difference <= TOLERANCES[shape.dtype]:  # NaN fails too
        raise UserError(
            f"{reference.architecture}: the exported graph's logits differ from transformers' by {difference:.1e}",
            "this model cannot be exported faithfully; please report its config.json",
        )
    if shape.dtype == torch.float16:
        wide.unlink()
        narrow = _difference(reference, graph, shape, np.float16)
        if not narrow <= FP16_TOLERANCE:
            raise UserError(
                f"{reference.architecture}: the logits in fp16 differ from those in fp32 by {narrow:.1e}",
                "give --precision bf16: its range is that of fp32",
            )
    elif wide != graph:
        wide.unlink()
    return difference


def _difference(reference: Reference, graph: Path, shape: RoundShape, dtype: type[np.floating[Any]]) -> float:
    """The largest, relative to the largest logit."""
    session = GraphSession(graph, shape, dtype)
    got = np.concatenate([session.run(*inputs) for inputs in reference.passes])
    return float(np.abs(got - reference.logits).max() / max(np.abs(reference.logits).max(), 1e-9))


class GraphSession:
    """The round graph, pass by pass; the state goes back in as in the runtime, through copies."""

    def __init__(self, graph: Path, shape: RoundShape, dtype: type[np.floating[Any]]) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3  # errors only: it would warn that these runs copy the cache
        if shape.dtype != torch.float32:  # as a rule each weight would be kept in fp32, too, or twice, for speed
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.add_session_config_entry("session.disable_prepacking", "1")
            options.enable_cpu_mem_arena = False
            options.enable_mem_pattern = False
            options.execution_order = ort.ExecutionOrder.PRIORITY_BASED  # the other widens all weights first
        self._session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        self._outputs = [value.name for value in self._session.get_outputs()]
        self._has_history = any(value.name == "history" for value in self._session.get_inputs())
        self._history_rows = shape.cache_rows if shape.fixed else None
        nodes = shape.max_tree_nodes if shape.fixed else 1
        self._paths = np.full((nodes, shape.depth + 1), -1)
        self._tree = np.zeros(nodes, dtype=np.int64)
        self._stop_ids = np.full(shape.stop_ids if shape.fixed else 0, -1)
        cache = np.zeros(shape.cache_size, dtype=dtype)
        self._state: dict[str, npt.NDArray[Any]] = {
            "past_length": np.zeros(1, dtype=np.int64),
            "pending_rows": np.zeros(shape.depth + 1, dtype=np.int64),
            "pending_count": np.zeros(1, dtype=np.int64),
            "token_budget": np.array([shape.cache_rows]),
            "finished": np.zeros(1, dtype=np.bool_),
            **dict.fromkeys(cache_names("past_key", "past_value", shape), cache),
        }

    def run(self, input_ids: Int64Array, position_ids: Int64Array, tree_mask: npt.NDArray[np.bool_]) -> Logits:
        """Logits [N, V] of N rows; the last row is the one that is accepted."""
        rows = len(input_ids)
        self._paths[0, 0] = rows - 1
        feed = {
            "input_ids": input_ids[None],
            "position_ids": position_ids[None],
            "tree_mask": tree_mask,
            "logit_rows": np.arange(rows),
            "retrieve_indices": self._paths,
            "tree_indices": self._tree,
            "stop_ids": self._stop_ids,
            **self._state,
        }
        if self._has_history:  # says nothing about logits
            feed["history"] = np.zeros(self._history_rows or int(position_ids[-1]), dtype=np.int64)
        named = dict(zip(self._outputs, self._session.run(None, feed), strict=True))
        for name in self._state:
            source = name.replace("past_", "present_", 1) if "." in name else f"next_{name}"
            self._state[name] = named[source]
        logits: Logits = named["logits"]
        return logits


def _transformers_logits(model: Any, tokens: Int64Array) -> Logits:
    traced_attention = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad(), _computed_in_fp32(model):
            logits: Logits = model(torch.from_numpy(tokens)[None], use_cache=False).logits[0].numpy()
    finally:
        model.set_attn_implementation(traced_attention)
    return logits


@contextmanager
def _computed_in_fp32(model: torch.nn.Module) -> Iterator[None]:
    """Let each module have its own weights in fp32 while it runs: all at once they would take twice the memory."""
    stored: dict[torch.nn.Parameter, torch.Tensor] = {}

    def widen(module: torch.nn.Module, _inputs: Any) -> None:
        for parameter in module.parameters(recurse=False):
            stored[parameter] = parameter.data
            parameter.data = parameter.data.float()

    def restore(module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = stored.pop(parameter)

    hooks = []
    for module in model.modules():
        if any(parameter.dtype != torch.float32 for parameter in module.parameters(recurse=False)):
            hooks += [module.register_forward_pre_hook(widen), module.register_forward_hook(restore)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
