"""Search trees: which nodes one round should verify, given what the heads were seen to get right.

Everything works on rank vectors: for a position, entry j is the rank at which head j lists the token that the target
goes on to publish there, or MISS. The path (r0, ..., rd) is accepted exactly when the vector starts with it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from medusa_engine.runtime.tree import Tree, TreePath

MISS = -1

Ranks = npt.NDArray[np.int64]
Mass = Callable[[TreePath], float]


def rank_mass(ranks: Ranks, topk: int) -> npt.NDArray[np.float64]:
    """Share of positions at which head j is right at rank r: [K, TOPK]; increments, not cumulative accuracies."""
    return np.stack([(ranks == rank).mean(axis=0) for rank in range(topk)], axis=1)


def mass_from_cumulative(accuracy: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Rank mass from top-i accuracies [..., TOPK]: their increments."""
    return np.diff(accuracy, axis=-1, prepend=0.0)


def marginal_mass(mass: npt.NDArray[np.float64]) -> Mass:
    """A path's weight as the product of its ranks' mass, heads taken as independent (arXiv 2401.10774, 2.3.3)."""

    def weight(path: TreePath) -> float:
        return float(np.prod([mass[depth, rank] for depth, rank in enumerate(path)]))

    return weight


def joint_mass(ranks: Ranks) -> Mass:
    """A path's weight as the share of positions at which it would have been accepted."""
    counts: Counter[TreePath] = Counter()
    for vector in ranks.tolist():
        path: TreePath = ()
        for rank in vector:
            if rank == MISS:
                break
            path += (rank,)
            counts[path] += 1
    return lambda path: counts[path] / len(ranks)


def best_first(mass: Mass, *, nodes: int, heads: int, topk: int, name: str = "searched") -> Tree:
    """The prefix-closed tree of `nodes` rows, root included, with the largest sum of weights.

    A weight never grows along a path, so taking the heaviest path next is optimal. Equal weights: the shorter path,
    then the lexicographically smaller one. Paths of weight 0 are left out, so the tree may be smaller than asked for.
    """
    chosen: list[TreePath] = []
    frontier = [(-mass((rank,)), 1, (rank,)) for rank in range(topk)] if heads else []
    heapq.heapify(frontier)
    while frontier and len(chosen) < nodes - 1:
        weight, depth, path = heapq.heappop(frontier)
        if weight == 0.0:
            break
        chosen.append(path)
        if depth < heads:
            for rank in range(topk):
                child = (*path, rank)
                heapq.heappush(frontier, (-mass(child), depth + 1, child))
    return Tree(tuple(sorted(chosen, key=lambda path: (len(path), path))), name)


def expected_published(tree: Tree, mass: Mass) -> float:
    """E[G] = 1 + the sum of the paths' weights: the root is always published."""
    return 1.0 + sum(mass(path) for path in tree.paths)


def replay(tree: Tree, sequences: Sequence[Ranks]) -> list[int]:
    """G of every round that this tree would have taken through answers given by their rank vectors [T, K].

    Entry t of an answer belongs to the state behind token t-1, the prompt's last token for t = 0; the round that
    starts there publishes token t and the accepted path.
    """
    paths = set(tree.paths)
    published = []
    for ranks in sequences:
        vectors = ranks.tolist()
        position = 0
        while position < len(vectors):
            path: TreePath = ()
            for rank in vectors[position]:
                if (*path, rank) not in paths:
                    break
                path = (*path, rank)
            published.append(min(1 + len(path), len(vectors) - position))
            position += published[-1]
    return published
