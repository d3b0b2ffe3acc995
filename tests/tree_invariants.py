"""What must hold between a path set and the buffers of a round, without the code that derives them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from medusa_engine.runtime.tree import LOOKUP
from medusa_engine.runtime.tree_buffers import TreeBuffers


def prefix_closure(paths: Iterable[Sequence[int]]) -> set[tuple[int, ...]]:
    """The paths and every non-empty prefix of them."""
    return {tuple(path[:length]) for path in paths for length in range(1, len(path) + 1)}


def check_tree_buffers(
    buffers: TreeBuffers, row_paths: Sequence[tuple[int, ...]], *, topk: int, depth: int, heads: int | None = None
) -> None:
    """Check every buffer against the path of each packed row.

    Args:
        row_paths: path of packed row u, for u in 0 … N - 1; the root's is ().
        topk: candidates per head.
        depth: edges that the engine's paths can have.
        heads: of the engine; None for `depth`.

    Raises:
        AssertionError: an invariant fails; the message starts with the name of the buffer.
    """
    rows = range(len(row_paths))
    leaves = [path for path in row_paths if not any(_is_child(other, path) for other in row_paths)]
    for name, dtype, shape in (
        ("tree_mask", np.bool_, (len(rows), len(rows))),
        ("position_offsets", np.int64, (len(rows),)),
        ("tree_indices", np.int64, (len(rows),)),
        ("retrieve_indices", np.int64, (len(leaves), depth + 1)),
    ):
        buffer = getattr(buffers, name)
        assert buffer.dtype == dtype, f"{name}: {buffer.dtype}"
        assert buffer.shape == shape, f"{name}: {buffer.shape}"
        assert not buffer.flags.writeable, f"{name}: can be written"

    for u in rows:
        for v in rows:
            is_prefix = row_paths[u][: len(row_paths[v])] == row_paths[v]
            assert buffers.tree_mask[u, v] == is_prefix, f"tree_mask: row {u} sees row {v}: {not is_prefix}"

    for u in rows:
        offset = buffers.position_offsets[u]
        assert offset == len(row_paths[u]), f"position_offsets: row {u} is at offset {offset}"

    for u in rows:
        if LOOKUP in row_paths[u]:
            # Behind the root's slot and those of all heads, one for each depth.
            slot = int(buffers.tree_indices[u]) - 1 - (depth if heads is None else heads) * topk
            assert slot == len(row_paths[u]) - 1, f"tree_indices: lookup row {u} has slot {slot} of lookup"
            continue
        # The slots of a row and its ancestors, nearest the root first, name one rank of each head in turn.
        line = [v for v in rows if row_paths[u][: len(row_paths[v])] == row_paths[v]]
        line.sort(key=lambda v: len(row_paths[v]))
        slots = [int(buffers.tree_indices[v]) for v in line]
        assert slots[0] == 0, f"tree_indices: the root has slot {slots[0]}"
        heads_and_ranks = [divmod(slot - 1, topk) for slot in slots[1:]]
        assert heads_and_ranks == list(enumerate(row_paths[u])), f"tree_indices: row {u} gathers {slots}"

    retrieved_leaves = []
    covered: set[int] = set()
    for entry in buffers.retrieve_indices.tolist():
        length = entry.index(-1) if -1 in entry else len(entry)
        assert set(entry[length:]) <= {-1}, f"retrieve_indices: padding inside {entry}"
        path_rows = entry[:length]
        assert all(row in rows for row in path_rows), f"retrieve_indices: {entry} has no such row"
        assert path_rows, f"retrieve_indices: {entry} is padding alone"
        assert row_paths[path_rows[0]] == (), f"retrieve_indices: {entry} misses the root"
        for parent, child in pairwise(path_rows):
            assert _is_child(row_paths[child], row_paths[parent]), (
                f"retrieve_indices: row {parent} is not the parent of row {child}"
            )
        retrieved_leaves.append(row_paths[path_rows[-1]])
        covered.update(path_rows)
    assert retrieved_leaves == leaves, f"retrieve_indices: leaves {retrieved_leaves}"
    assert covered == set(rows), f"retrieve_indices: only rows {sorted(covered)} are reached"


def _is_child(path: tuple[int, ...], parent: tuple[int, ...]) -> bool:
    return len(path) == len(parent) + 1 and path[:-1] == parent
