"""Acceptance other than greedy in numpy: the reference that exported round graphs must reproduce.

Every function takes leading dimensions [...], so that many rounds of one tree are accepted at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from medusa_engine.runtime.sampling import draw

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Accepted(NamedTuple):
    """What rounds accept.

    Attributes:
        accepted_suffix_length: [...] int64, a: accepted edges below the root.
        path_rows: [..., D + 1] int64, packed rows of the published tokens; -1 beyond the first G = a + 1.
        published_tokens: [..., D + 1] int64, their tokens, root first; -1 beyond the first G.
        next_root: [...] int64, root of the next tree.
    """

    accepted_suffix_length: Ints
    path_rows: Ints
    published_tokens: Ints
    next_root: Ints


def accept_sample(input_ids: Ints, drawn: Ints, retrieve_indices: Ints) -> Accepted:
    """Follow the child that carries the drawn token, and stop where there is none.

    At every row one token was drawn from the target's processed distribution there. The drawn token at the stop is
    the next root, so each token is one draw from its own distribution, whatever the tree proposed.

    Args:
        input_ids: [..., N] packed tree tokens.
        drawn: [..., N] the token drawn at each packed row.
        retrieve_indices: [paths, D + 1] rows from the root to each leaf, padded with -1.
    """
    rows, valid = _paths(retrieve_indices)
    passed = valid[:, 1:] & (input_ids[..., rows[:, 1:]] == drawn[..., rows[:, :-1]])  # [..., paths, D]
    return _longest(input_ids, drawn, rows, passed, np.zeros(passed.shape))


def accept_typical(
    input_ids: Ints,
    probabilities: Floats,
    next_tokens: Ints,
    retrieve_indices: Ints,
    *,
    posterior_threshold: float,
    posterior_alpha: float,
) -> Accepted:
    """Accept the longest path whose every token the target finds likely enough; does not preserve the distribution.

    A candidate c behind a row passes if, with H the entropy of the target's probabilities p at that row in nats::

        p(c) > min(posterior_threshold, posterior_alpha * exp(-H))

    Of paths with equally many accepted edges the one with the largest sum of log p over these edges wins, then the
    first.

    Args:
        input_ids: [..., N] packed tree tokens.
        probabilities: [..., N, V] the target's, at the temperature, by packed row.
        next_tokens: [..., N] the next root, should the row be the last accepted one: argmax or drawn.
        retrieve_indices: [paths, D + 1] rows from the root to each leaf, padded with -1.

    Source: arXiv 2401.10774, section 2.3.1.
    """
    rows, valid = _paths(retrieve_indices)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(probabilities > 0, probabilities * np.log(probabilities), 0).sum(axis=-1)  # [..., N]
    threshold = np.minimum(posterior_threshold, posterior_alpha * np.exp(-entropy))  # [..., N]
    parents, children = rows[:, :-1], rows[:, 1:]  # [paths, D]
    candidate = input_ids[..., children]  # [..., paths, D]
    likely = np.take_along_axis(probabilities[..., parents, :], candidate[..., None], axis=-1)[..., 0]
    passed = valid[:, 1:] & (likely > threshold[..., parents])
    return _longest(input_ids, next_tokens, rows, passed, np.log(np.where(passed, likely, 1.0)))


def accept_rejection(
    root: Ints,
    drafts: Ints,
    target: Floats,
    proposal: Floats,
    accept_uniform: npt.NDArray[np.floating[Any]],
    correct_uniform: npt.NDArray[np.floating[Any]],
) -> Accepted:
    """Rejection sampling of a chain in which each token was drawn from its head's own distribution.

    Draft j passes if accept_uniform[j] < p_j(draft) / q_j(draft). Behind the first that does not, the next root is
    drawn from max(0, p_j - q_j); behind the last of a chain that passes as a whole, from p.

    Args:
        root: [...] tokens.
        drafts: [..., D] tokens, draft j drawn from q_j.
        target: [..., D + 1, V] the target's processed probabilities behind the root and each draft.
        proposal: [..., D, V] the heads' probabilities q.
        accept_uniform: [..., D], independent of the draft draws.
        correct_uniform: [..., D + 1], one for each row that may be the last accepted; independent of all these.

    Source: Leviathan et al., arXiv 2211.17192, section 2.3.
    """
    depth = drafts.shape[-1]
    p = np.take_along_axis(target[..., :-1, :], drafts[..., None], axis=-1)[..., 0]  # [..., D]
    q = np.take_along_axis(proposal, drafts[..., None], axis=-1)[..., 0]
    rows = np.arange(depth + 1)[None]  # the chain is its own packed order
    input_ids = np.concatenate([root[..., None], drafts], axis=-1)
    passed = (accept_uniform * q < p)[..., None, :]  # [..., 1, D]
    residual = np.concatenate([np.maximum(target[..., :-1, :] - proposal, 0), target[..., -1:, :]], axis=-2)
    next_tokens = draw(residual, correct_uniform)
    return _longest(input_ids, next_tokens, rows, passed, np.zeros(passed.shape))


def _paths(retrieve_indices: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Rows without padding (the root's in its place: -1 would read the last row), and which are rows of the path."""
    valid = retrieve_indices >= 0
    return np.where(valid, retrieve_indices, retrieve_indices[:, :1]), valid


def _longest(input_ids: Ints, next_tokens: Ints, rows: Ints, passed: npt.NDArray[np.bool_], score: Floats) -> Accepted:
    """The path with the most edges passed from the root on; then the largest score of these edges; then the first."""
    prefix = np.logical_and.accumulate(passed, axis=-1)  # [..., paths, D]
    lengths = prefix.sum(axis=-1)  # [..., paths]
    scores = np.where(prefix, score, 0).sum(axis=-1)
    longest = lengths == lengths.max(axis=-1, keepdims=True)
    best = np.where(longest, scores, -np.inf).argmax(axis=-1)  # [...]
    length = np.take_along_axis(lengths, best[..., None], axis=-1)  # [..., 1]
    path = rows[best]  # [..., D + 1]
    published = np.arange(path.shape[-1]) <= length
    winning_row = np.take_along_axis(path, length, axis=-1)
    return Accepted(
        accepted_suffix_length=length[..., 0],
        path_rows=np.where(published, path, -1),
        published_tokens=np.where(published, np.take_along_axis(input_ids, path, axis=-1), -1),
        next_root=np.take_along_axis(next_tokens, winning_row, axis=-1)[..., 0],
    )
