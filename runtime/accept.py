"""Greedy acceptance of one round in numpy: the reference that an exported round graph must reproduce."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Acceptance:
    """What one round accepts.

    Attributes:
        accepted_suffix_length: a, accepted edges below the root.
        published_count: G = a + 1, published tokens, root included.
        path_rows: [D + 1] int64, packed rows of the published tokens; -1 beyond the first G.
        published_tokens: [G] int64, root token first.
        winning_row: packed row of the last published token; its hidden state feeds the Medusa heads.
        next_root: the target's own token after the winning row, root of the next tree.
    """

    accepted_suffix_length: int
    published_count: int
    path_rows: npt.NDArray[np.int64]
    published_tokens: npt.NDArray[np.int64]
    winning_row: int
    next_root: int


def accept_greedy(
    input_ids: npt.NDArray[np.int64],
    predicted: npt.NDArray[np.int64],
    retrieve_indices: npt.NDArray[np.int64],
) -> Acceptance:
    """Accept the longest path whose every token is the target's argmax at the token's parent.

    For a path of packed rows r_0 (root), r_1, …, r_D::

        match_j = r_j >= 0 and input_ids[r_j] == predicted[r_(j-1)]      j = 1 … D
        a       = largest k for which match_1 … match_k all hold, maximised over paths

    The root is published always: the previous round's target chose it. Of paths with equal a the first
    wins; they agree in the accepted tokens. Entries of -1 are replaced before any array is indexed by them,
    because -1 would otherwise read the last row.

    Args:
        input_ids: [N] integer, packed tree tokens.
        predicted: [N] integer, argmax of the target's logits at each packed row.
        retrieve_indices: [paths, D + 1] integer, rows from the root to each leaf, padded with -1. Every
            path starts at the root's row, which need not be row 0.

    Returns:
        Acceptance with G = a + 1 published tokens.

    Raises:
        ValueError: shapes disagree, a row is not in -1 … N - 1, or the paths do not share a root.

    Source: arXiv 2401.10774, section 2.3.1, at temperature 0.
    """
    if input_ids.ndim != 1 or predicted.shape != input_ids.shape:
        raise ValueError(f"input_ids {input_ids.shape} and predicted {predicted.shape} are not both [N]")
    if retrieve_indices.ndim != 2 or 0 in retrieve_indices.shape:
        raise ValueError(f"retrieve_indices {retrieve_indices.shape} is not [paths, D + 1]")
    if retrieve_indices.min() < -1 or retrieve_indices.max() >= len(input_ids):
        raise ValueError(f"retrieve_indices has a row outside -1 … {len(input_ids) - 1}")
    root_row = retrieve_indices[0, 0]
    if root_row < 0 or (retrieve_indices[:, 0] != root_row).any():
        raise ValueError("the paths of retrieve_indices do not all start at one root row")

    valid = retrieve_indices >= 0  # [paths, D + 1]
    rows = np.where(valid, retrieve_indices, root_row)  # [paths, D + 1]
    matches = valid[:, 1:] & (input_ids[rows[:, 1:]] == predicted[rows[:, :-1]])  # [paths, D]
    suffix_lengths = np.logical_and.accumulate(matches, axis=1).sum(axis=1)  # [paths]
    path = int(np.argmax(suffix_lengths))  # argmax returns the first of equals
    accepted_suffix_length = int(suffix_lengths[path])
    published_count = accepted_suffix_length + 1

    path_rows = np.full(retrieve_indices.shape[1], -1, dtype=np.int64)  # [D + 1]
    path_rows[:published_count] = rows[path, :published_count]
    winning_row = int(path_rows[accepted_suffix_length])
    return Acceptance(
        accepted_suffix_length=accepted_suffix_length,
        published_count=published_count,
        path_rows=path_rows,
        published_tokens=input_ids[path_rows[:published_count]].astype(np.int64),
        winning_row=winning_row,
        next_root=int(predicted[winning_row]),
    )
