"""What the heads get right by head and rank, and rounds by depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from medusa_engine.training.tree_search import Hits, labelled, rank_mass


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


def hit_rates(answers: Sequence[Hits], topk: int) -> HitRates:
    """Of answers, at least one."""
    ranks = Hits.joined(answers).ranks
    return HitRates(rank_mass(ranks, topk).tolist(), labelled(ranks).tolist())


def depth_rates(published: Sequence[int], depth: int) -> list[float]:
    """Share of the rounds that published a draft at each depth from 1, given those that published its parent."""
    reached = [sum(count > edges for count in published) for edges in range(depth + 1)]
    return [below / above if above else 0.0 for above, below in pairwise(reached)]
