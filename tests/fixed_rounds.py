"""Rounds of fixed shapes: bundles for TensorRT in fp32, which ONNX Runtime runs, and trees padded to the largest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from graph_probe import Arrays, Pending, RoundProbe
from tiny_models import Exported, export

from medusa_engine.runtime.manifest import TARGET_DTYPES, TENSORRT
from medusa_engine.runtime.tree_buffers import TreeBuffers


@contextmanager
def fp32_for_tensorrt() -> Iterator[None]:
    """Let a bundle for TensorRT have the precision in which two graphs of one model agree."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TARGET_DTYPES, TENSORRT, ("float32", *TARGET_DTYPES[TENSORRT]))
        yield


def export_fixed(checkpoint: Path, folder: Path, *options: str) -> Exported:
    with fp32_for_tensorrt():
        return export(checkpoint, folder, "--target", "tensorrt", "--precision", "fp32", *options)


class FixedProbe(RoundProbe):
    """A round graph of fixed shapes, whose `run` takes the buffers of any tree and gives the rows of that alone."""

    def __init__(self, folder: Path, stop_ids: int = 1, **options: Any) -> None:
        with fp32_for_tensorrt():
            super().__init__(folder, **options)
        self._stop_ids = stop_ids
        self.padding_token = 0

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
        """As `RoundProbe.run`; a chunk (its paths begin at the last row) has as many rows as it has, and one logit row.

        In a tree, rows of `padding_token` at the root's position fill N, and see themselves alone.
        """
        given, rows = np.asarray(tokens, dtype=np.int64), len(tree.tree_indices)
        chunk = tree.retrieve_indices[0, 0] > 0 or rows == 1
        size = rows if chunk else self.limits.max_tree_nodes
        if chunk:
            replaced = {"logit_rows": np.array([rows - 1])} | replaced
        padded = padded_tree(tree, size, self.limits.max_tree_nodes)
        given = np.concatenate([given, np.full(size - rows, self.padding_token)])
        stop_ids = np.full(self._stop_ids, -1)
        given_ids = replaced.pop("stop_ids", ())
        stop_ids[: len(given_ids)] = given_ids
        if "logits" in replaced:
            extra = np.zeros((size - len(replaced["logits"]), replaced["logits"].shape[1]), np.float32)
            replaced["logits"] = np.concatenate([replaced["logits"], extra])[-1 if chunk else 0 :]
        if "history" in self._inputs:
            replaced = {"history": np.zeros(self.limits.cache_rows, dtype=np.int64)} | replaced
        following = padded_tree(next_tree or tree, self.limits.max_tree_nodes, self.limits.max_tree_nodes)
        values = super().run(
            given, pending, padded, next_tree=following, keep_cache=keep_cache, stop_ids=stop_ids, **replaced
        )
        proposed = len((next_tree or tree).tree_indices)
        for name in ("next_input_ids", "next_position_ids"):
            assert values[name].shape == (1, self.limits.max_tree_nodes)
            values[name] = values[name][:, :proposed]
        if "logits" in values and not chunk:
            values["logits"] = values["logits"][:rows]
        return values


def padded_tree(tree: TreeBuffers, rows: int, paths: int) -> TreeBuffers:
    """The buffers of a tree with more rows than it has, which see themselves alone and lie on no path."""
    own = len(tree.tree_indices)
    mask = np.eye(rows, dtype=np.bool_)
    mask[:own, :own] = tree.tree_mask
    offsets, slots = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    offsets[:own], slots[:own] = tree.position_offsets, tree.tree_indices
    retrieve_indices = np.full((paths, tree.retrieve_indices.shape[1]), -1)
    retrieve_indices[: len(tree.retrieve_indices)] = tree.retrieve_indices
    return TreeBuffers(tree_mask=mask, position_offsets=offsets, tree_indices=slots, retrieve_indices=retrieve_indices)
