"""Run the exported round beside transformers before the bundle is put in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import torch

from medusa_engine.exporter.round_shape import RoundShape
from medusa_engine.exporter.trace import cache_names
from medusa_engine.runtime.errors import UserError

# fp32 logits of two correct implementations differ by rounding only; a wrong row or position by far more.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
CHUNK_TOKENS = 16
BRANCH_TOKENS = 6

Int64Array = npt.NDArray[np.int64]


def check_logits(model: Any, graph: Path, shape: RoundShape) -> float:
    """Compare the graph's logits with transformers' own eager attention: a prompt chunk, then a tree behind it.

    The tree has a root and two branches of equal positions, so that rows, positions and the cache of the earlier
    pass all show in the logits.

    Args:
        model: the backbone that was traced.
        graph: a round graph that outputs its logits too.

    Returns:
        The largest difference, relative to the largest logit.

    Raises:
        UserError: they differ by more than `TOLERANCES` allow, or transformers' are NaN.
    """
    room = shape.cache_rows - shape.depth - 1 - (shape.max_tree_nodes if shape.fixed else 0)
    chunk = min(CHUNK_TOKENS, max(1, room - 1))
    branch = max(0, min(BRANCH_TOKENS, (room - chunk - 1) // 2))
    vocab_size = model.config.get_text_config().vocab_size
    tokens = np.random.default_rng(0).integers(0, vocab_size, size=chunk + 1 + 2 * branch)
    behind_root = chunk + 1
    branches = tokens[behind_root : behind_root + branch], tokens[behind_root + branch :]
    one, other = (_transformers_logits(model, np.concatenate([tokens[:behind_root], path])) for path in branches)
    if np.isnan(one).any() or np.isnan(other).any():
        raise UserError(
            f"{type(model).__name__}: the model's own logits are NaN in transformers",
            "check the checkpoint: weights that are NaN or infinite cannot be decoded with",
        )

    session = GraphSession(graph, shape)
    got = [session.run(tokens[:chunk], np.arange(chunk), np.tri(chunk, dtype=np.bool_))]
    expected = [one[:chunk]]
    if chunk < room:
        depths = np.concatenate([[0], *[np.arange(1, branch + 1)] * 2])
        mask = np.zeros((1 + 2 * branch, 1 + 2 * branch), dtype=np.bool_)
        mask[:, 0] = True
        for start in (1, 1 + branch):
            mask[start : start + branch, start : start + branch] = np.tri(branch, dtype=np.bool_)
        got.append(session.run(tokens[chunk:], chunk + depths, mask))
        expected += [one[chunk:], other[behind_root:]]
    difference = _relative_difference(np.concatenate(got), np.concatenate(expected))
    if not difference <= TOLERANCES[shape.dtype]:  # NaN fails too
        raise UserError(
            f"{type(model).__name__}: the exported graph's logits differ from transformers' by {difference:.1e}",
            "this model cannot be exported faithfully; please report its config.json",
        )
    return difference


class GraphSession:
    """The round graph, pass by pass; the state goes back in as in the runtime, through copies."""

    def __init__(self, graph: Path, shape: RoundShape) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3  # errors only: it would warn that these runs copy the cache
        self._session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        self._outputs = [value.name for value in self._session.get_outputs()]
        nodes = shape.max_tree_nodes if shape.fixed else 1
        self._paths = np.full((nodes, shape.depth + 1), -1)
        self._tree = np.zeros(nodes, dtype=np.int64)
        self._stop_ids = np.full(shape.stop_ids if shape.fixed else 0, -1)
        cache = np.zeros(shape.cache_size, dtype=str(shape.dtype).removeprefix("torch."))
        self._state: dict[str, npt.NDArray[Any]] = {
            "past_length": np.zeros(1, dtype=np.int64),
            "pending_rows": np.zeros(shape.depth + 1, dtype=np.int64),
            "pending_count": np.zeros(1, dtype=np.int64),
            "token_budget": np.array([shape.cache_rows]),
            "finished": np.zeros(1, dtype=np.bool_),
            **dict.fromkeys(cache_names("past_key", "past_value", shape), cache),
        }

    def run(
        self, input_ids: Int64Array, position_ids: Int64Array, tree_mask: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.float32]:
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
        named = dict(zip(self._outputs, self._session.run(None, feed), strict=True))
        for name in self._state:
            source = name.replace("past_", "present_", 1) if "." in name else f"next_{name}"
            self._state[name] = named[source]
        logits: npt.NDArray[np.float32] = named["logits"]
        return logits


def _transformers_logits(model: Any, tokens: Int64Array) -> npt.NDArray[np.float32]:
    traced_attention = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            logits: npt.NDArray[np.float32] = (
                model(torch.from_numpy(tokens)[None], use_cache=False).logits[0].float().numpy()
            )
    finally:
        model.set_attn_implementation(traced_attention)
    return logits


def _relative_difference(got: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    return float(np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-9))
