"""What past rounds tell of the next: how far lookups were right, and means that count old rounds less."""

from __future__ import annotations

from bisect import bisect_right

from medusa_engine.runtime.lookup import LONGEST_KEY
from medusa_engine.runtime.lookup_replay import Match

STREAKS = (1, 3, 6)  # tokens that lookups found in a row: what comes behind fewer and behind more is told apart
KINDS = LONGEST_KEY + 1 + len(STREAKS)  # of matches
COPYING = KINDS - 1  # the kind of those that go on with what they have copied for long

_EXPECTED = (0, 0, 1, 1, 1, 3, 6)  # right tokens by kind, while nothing is known: a streak lasts as long again


def kind_of(match: Match) -> int:
    """Matches of a kind are expected to be right equally far: by their key, and of the longest keys by the streak."""
    return match.key if match.key < LONGEST_KEY else LONGEST_KEY + bisect_right(STREAKS, match.streak)


class LookupHits:
    """How many tokens of a lookup were right, older rounds counted less.

    Args:
        depth: tokens of a lookup.
        memory: rounds that count.

    Attributes:
        counts: [KINDS][1 + depth], rounds by kind of match, and by right tokens.
    """

    def __init__(self, depth: int, memory: float) -> None:
        self._kept = 1 - 1 / memory
        self.counts = [[0.0] * (1 + depth) for _ in range(KINDS)]

    def expect_the_usual(self) -> None:
        """Begin with two rounds of each kind: one that finds nothing, and one that finds what is expected."""
        for counts, right in zip(self.counts, _EXPECTED, strict=True):
            counts[0] += 1
            counts[min(right, len(counts) - 1)] += 1

    def add(self, kind: int, hits: int) -> None:
        self.counts[kind] = [self._kept * count for count in self.counts[kind]]
        self.counts[kind][hits] += 1


class Mean:
    """`total` over `weight`, of values that count less the older they are."""

    def __init__(self, memory: float) -> None:
        self._kept = 1 - 1 / memory
        self.weight = self.total = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        self.weight = self._kept * self.weight + weight
        self.total = self._kept * self.total + value
