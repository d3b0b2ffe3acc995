"""Search trees: which nodes one round should verify, given what the heads were seen to get right.

Everything works on rank vectors, one per published token: entry j is the rank at which head j lists the token that the
target publishes j + 1 behind it; MISS where the head does not list it, END where the answer has ended before. The path
(r0, ..., rd) is accepted exactly when the vector starts with it. Lookup nodes beside them: `lookup_search`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from medusa_engine.runtime.tree import LOOKUP, Tree, TreePath

MISS = -1
END = -2

Ranks = npt.NDArray[np.int64]
Runs = npt.NDArray[np.int64]
Mass = Callable[[TreePath], float]


class Hits(NamedTuple):
    """What is right behind each of the T tokens of an answer.

    Attributes:
        ranks: [T, K], a rank vector for each token.
        runs: [T], how many of the tokens looked up behind it are right, up to the first that is not.
    """

    ranks: Ranks
    runs: Runs

    @classmethod
    def of_heads(cls, ranks: Ranks) -> Hits:
        """Without lookup."""
        return cls(ranks, np.zeros(len(ranks), dtype=np.int64))

    @classmethod
    def joined(cls, answers: Sequence[Hits]) -> Hits:
        """Of the tokens of several answers."""
        return cls(np.concatenate([hits.ranks for hits in answers]), np.concatenate([hits.runs for hits in answers]))


def rank_counts(ranks: Ranks, topk: int) -> npt.NDArray[np.int64]:
    """How often head j is right at rank r: [K, TOPK]."""
    return np.stack([(ranks == rank).sum(axis=0) for rank in range(topk)], axis=1)


def labelled(ranks: Ranks) -> npt.NDArray[np.int64]:
    """Positions at which there is a token for head j to guess: [K]."""
    return np.asarray((ranks != END).sum(axis=0), dtype=np.int64)


def rank_mass(ranks: Ranks, topk: int) -> npt.NDArray[np.float64]:
    """Share of its positions at which head j is right at rank r: [K, TOPK]; increments of the top-i accuracy."""
    mass: npt.NDArray[np.float64] = rank_counts(ranks, topk) / np.maximum(labelled(ranks), 1)[:, None]
    return mass


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
            if rank < 0:
                break
            path += (rank,)
            counts[path] += 1
    return lambda path: counts[path] / len(ranks)


def path_mass(counts: str, ranks: Ranks, topk: int) -> Mass:
    """Weights from rank vectors by the name of the counts, one of COUNTS."""
    return joint_mass(ranks) if counts == "joint" else marginal_mass(rank_mass(ranks, topk))


def best_first_order(mass: Mass, *, nodes: int, heads: int, topk: int) -> list[TreePath]:
    """The paths of the best tree of `nodes` rows, root included, in the order in which they are chosen.

    A weight never grows along a path, so taking the heaviest path next is optimal, and the tree of n rows is the first
    n - 1 paths. Equal weights: the shorter path, then the lexicographically smaller one. Paths of weight 0 are left
    out, so there may be fewer than asked for.
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
    return chosen


def tree_of(paths: Iterable[TreePath], name: str = "searched") -> Tree:
    """A tree of prefix-closed paths in any order."""
    return Tree(tuple(sorted(paths, key=lambda path: (len(path), path))), name)


def best_first(mass: Mass, *, nodes: int, heads: int, topk: int) -> Tree:
    """The prefix-closed tree of `nodes` rows, root included, with the largest sum of weights; see `best_first_order`.

    Source: arXiv 2401.10774, section 2.3.3.
    """
    return tree_of(best_first_order(mass, nodes=nodes, heads=heads, topk=topk))


def expected_published(tree: Tree, mass: Mass) -> float:
    """E[G] = 1 + the sum of the paths' weights: the root is always published."""
    return 1.0 + sum(mass(path) for path in tree.paths)


def replay(tree: Tree, answers: Sequence[Hits]) -> list[int]:
    """G of every round that this tree would have taken through answers.

    The round whose root is token t of an answer publishes it and the path that is accepted there; no round publishes
    more than what is left of the answer.
    """
    return [published for published, _ in replayed_rounds(tree, answers)]


def replayed_rounds(tree: Tree, answers: Sequence[Hits]) -> list[tuple[int, TreePath]]:
    """G of every round as in `replay`, and the path that it accepts, which the end of the answer may cut.

    Of a head's path and looked up tokens that are as long, which are the same tokens, the head's counts.
    """
    paths = set(tree.paths)
    rounds: list[tuple[int, TreePath]] = []
    for hits in answers:
        vectors, runs = hits.ranks.tolist(), np.minimum(hits.runs, tree.lookup).tolist()
        position = 0
        while position < len(vectors):
            path: TreePath = ()
            for rank in vectors[position]:
                if (*path, rank) not in paths:
                    break
                path = (*path, rank)
            if runs[position] > len(path):
                path = (LOOKUP,) * runs[position]
            published = min(1 + len(path), len(vectors) - position)
            rounds.append((published, path))
            position += published
    return rounds


def node_acceptance(tree: Tree, answers: Sequence[Hits]) -> dict[TreePath, float]:
    """Share of a tree's rounds in which each path was accepted, the answers' last rounds counted as they were cut.

    E[G] of these rounds is 1 + their sum.
    """
    rounds = replayed_rounds(tree, answers)
    counts = Counter(path[:length] for published, path in rounds for length in range(1, published))
    return {path: counts[path] / max(1, len(rounds)) for path in tree.paths}
