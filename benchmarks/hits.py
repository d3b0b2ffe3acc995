"""What the heads get right by head and rank, lookup by depth, and rounds by depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from medusa_engine.runtime.lookup import LONGEST_KEY
from medusa_engine.training.lookup_hits import Lookups
from medusa_engine.training.tree_search import Hits, labelled, rank_mass


class LookupRate(NamedTuple):
    """How often lookup says what the model goes on to publish.

    Attributes:
        key: tokens of the key that occurred before; 0 where none did, None for all together.
        found: share of the positions at which that was the longest key.
        right: by depth, share of those at which all tokens looked up to that depth are right.
    """

    key: int | None
    found: float
    right: list[float]


@dataclass(frozen=True)
class HitRates:
    """How often each head lists what the model goes on to publish, and how often lookup says it.

    Attributes:
        rates: [K][TOPK], share of the positions at which head j is right at rank r.
        positions: [K], positions that had a token for head j to guess.
        lookup: the longest key first, then all together; nothing where the engine looks nothing up.
    """

    rates: list[list[float]]
    positions: list[int]
    lookup: list[LookupRate]

    def missed(self, head: int) -> float:
        """Share of the positions at which the head does not list the token."""
        return 1.0 - sum(self.rates[head])


def hit_rates(answers: Sequence[Hits], topk: int, lookups: Sequence[Lookups] = (), depth: int = 0) -> HitRates:
    """Of answers, at least one.

    Args:
        lookups: of the same answers.
        depth: lookup nodes that the engine offers.
    """
    ranks = Hits.joined(answers).ranks
    rates = lookup_rates(lookups, depth) if depth else []
    return HitRates(rank_mass(ranks, topk).tolist(), labelled(ranks).tolist(), rates)


def lookup_rates(lookups: Sequence[Lookups], depth: int) -> list[LookupRate]:
    """By length of the key, the longest first; positions behind which less than `depth` tokens came are left out.

    Where all answers are shorter than that, depths end with the longest answer.
    """
    keys, runs, ahead = (np.concatenate(each) for each in zip(*lookups, strict=True))
    depth = min(depth, int(ahead.max(initial=0)))
    whole = ahead >= depth
    chosen: list[tuple[int | None, npt.NDArray[np.bool_]]] = [
        *((length, whole & (keys == length)) for length in range(LONGEST_KEY, -1, -1)),
        (None, whole),
    ]
    return [
        LookupRate(
            key,
            float(some.sum() / max(1, whole.sum())),
            [float((runs[some] >= step).sum() / max(1, some.sum())) for step in range(1, depth + 1)],
        )
        for key, some in chosen
    ]


def depth_rates(published: Sequence[int], depth: int) -> list[float]:
    """Share of the rounds that published a draft at each depth from 1, given those that published its parent."""
    reached = [sum(count > edges for count in published) for edges in range(depth + 1)]
    return [below / above if above else 0.0 for above, below in pairwise(reached)]
