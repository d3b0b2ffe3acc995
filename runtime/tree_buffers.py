"""The four buffers that a round reads, derived from a tree's path set."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from medusa_engine.runtime.tree import LOOKUP, Tree


@dataclass(frozen=True, eq=False)
class TreeBuffers:
    """What a round reads of a tree of N packed rows; read-only arrays, all from one path set.

    Attributes:
        tree_mask: [N, N] bool, `[u, v]` is true where row v is row u or one of its ancestors.
        position_offsets: [N] int64, depth of the row; its logical position is past_length + offset.
        tree_indices: [N] int64, candidate slot: 0 for the root, `1 + j * topk + r` for rank r of head j (from 0),
            `heads * topk + d` for the lookup node of depth d (from 1).
        retrieve_indices: [paths, depth + 1] int64, rows from the root to each leaf, leaves in canonical
            order, padded with -1.
    """

    tree_mask: npt.NDArray[np.bool_]
    position_offsets: npt.NDArray[np.int64]
    tree_indices: npt.NDArray[np.int64]
    retrieve_indices: npt.NDArray[np.int64]


def rows_among(proposed: TreeBuffers, tree: TreeBuffers) -> npt.NDArray[np.int64]:
    """Rows of what was proposed that hold the tokens of a tree, whose candidates are all among them.

    Returns:
        [N] int64 for the N rows of the tree. Nodes of one candidate, below different ones, share a row.
    """
    rows = {slot: row for row, slot in enumerate(proposed.tree_indices.tolist())}
    return np.array([rows[slot] for slot in tree.tree_indices.tolist()])


def compile_tree(tree: Tree, *, topk: int, depth: int, heads: int | None = None) -> TreeBuffers:
    """Derive all four buffers of a round from the tree's path set.

    Takes memory of N * N bytes: run `check_tree` on a user's tree first.

    Args:
        topk: candidates the engine keeps per head, above every rank of the tree.
        depth: D, edges the engine's paths can have, at least the tree's depth.
        heads: of the engine, behind whose candidate slots those of lookup lie; None for `depth`.

    Returns:
        TreeBuffers with N = tree.nodes rows and one retrieve row of depth + 1 columns per leaf.

    Raises:
        ValueError: the tree is deeper than `depth`, has longer paths of ranks than `heads` or a rank of at least
            `topk`.

    Source: tree attention, arXiv 2401.10774, section 2.1.2.
    """
    heads = depth if heads is None else heads
    if tree.depth > depth or tree.heads > heads or tree.widest_rank >= topk:
        raise ValueError(
            f"a tree of depth {tree.depth} and widest rank {tree.widest_rank} "
            f"does not fit depth {depth}, {heads} heads and topk {topk}"
        )
    row_of = {path: row for row, path in enumerate(((), *tree.paths))}
    parents = {path[:-1] for path in tree.paths}
    leaves = [path for path in row_of if path not in parents]
    tree_mask = np.eye(tree.nodes, dtype=np.bool_)  # [N, N]
    position_offsets = np.zeros(tree.nodes, dtype=np.int64)  # [N]
    tree_indices = np.zeros(tree.nodes, dtype=np.int64)  # [N]
    retrieve_indices = np.full((len(leaves), depth + 1), -1, dtype=np.int64)  # [paths, depth + 1]
    for path in tree.paths:
        row = row_of[path]
        tree_mask[row] |= tree_mask[row_of[path[:-1]]]
        position_offsets[row] = len(path)
        if path[-1] == LOOKUP:
            tree_indices[row] = heads * topk + len(path)
        else:
            tree_indices[row] = 1 + (len(path) - 1) * topk + path[-1]
    for index, leaf in enumerate(leaves):
        retrieve_indices[index, : len(leaf) + 1] = [row_of[leaf[:edges]] for edges in range(len(leaf) + 1)]
    for buffer in (tree_mask, position_offsets, tree_indices, retrieve_indices):
        buffer.setflags(write=False)
    return TreeBuffers(tree_mask, position_offsets, tree_indices, retrieve_indices)
