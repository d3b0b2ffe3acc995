"""What the heads get right: by head and rank, by node of a tree, by depth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from medusa_engine.runtime.tree import Tree, TreePath
from medusa_engine.training.tree_search import Ranks, labelled, rank_mass, replayed_rounds


@dataclass(frozen=True)
class HitRates:
    """How often each head lists what the model goes on to publish.

    Attributes:
        rates: [K][TOPK], share of the positions at which head j is right at rank r.
        positions: [K], positions that had a token for head j to guess.
    """

    rates: list[list[float]]
    positions: list[int]

    def missed(self, head: int) -> float:
        """Share of the positions at which the head does not list the token."""
        return 1.0 - sum(self.rates[head])


def hit_rates(sequences: Sequence[Ranks], topk: int) -> HitRates:
    """Of the rank vectors [T, K] of answers, at least one."""
    ranks = np.concatenate(list(sequences))
    return HitRates(rank_mass(ranks, topk).tolist(), labelled(ranks).tolist())


def node_acceptance(tree: Tree, sequences: Sequence[Ranks]) -> dict[TreePath, float]:
    """Share of a tree's rounds in which each path was accepted, the answers' last rounds counted as they were cut."""
    rounds = replayed_rounds(tree, sequences)
    counts = Counter(path[:length] for published, path in rounds for length in range(1, published))
    return {path: counts[path] / max(1, len(rounds)) for path in tree.paths}


def depth_rates(published: Sequence[int], depth: int) -> list[float]:
    """Share of the rounds that published a draft at each depth from 1, given those that published its parent."""
    reached = [sum(count > edges for count in published) for edges in range(depth + 1)]
    return [below / above if above else 0.0 for above, below in pairwise(reached)]
