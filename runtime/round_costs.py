"""What a round of one tree costs beside a round of another, from the wall times of rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median_low

LEAST_TIMED = 3  # rounds before a tree counts as timed
VISIT_ROUNDS = 5  # of a tree in a row that tell its cost; later ones tell the pace of the machine alone
COSTS_KEPT = 13  # more than two visits: one that was disturbed decides nothing
PACES_KEPT = 15


class RoundCosts:
    """Costs of rounds, in a unit that is theirs alone: only ratios mean something.

    A machine becomes faster and slower from second to second, for all trees alike, and a context grows. So the time of
    a round is divided by the pace, seconds per unit, of the rounds just before its tree took over; a tree's cost is
    the median of such quotients. A tree that was never timed is expected to cost what a straight line through the
    smallest and the largest of the others says.

    Args:
        rows: packed rows of each tree.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = list(rows)
        self._samples = [deque[float](maxlen=COSTS_KEPT) for _ in rows]
        self._costs: list[float | None] = [None] * len(self._rows)  # their medians
        self._paces = deque[float](maxlen=PACES_KEPT)
        self._tree = -1
        self._before = 0.0  # the pace before the visit of this tree
        self._visit = 0

    def add(self, tree: int, seconds: float) -> float | None:
        """Count a round of a tree.

        Returns:
            The cost of this round; None where the clock is too coarse to tell.
        """
        if seconds <= 0:
            return None
        if tree != self._tree:
            self._tree, self._visit = tree, 0
            self._before = median_low(self._paces) if self._paces else seconds
        samples = self._samples[tree]
        if self._visit < VISIT_ROUNDS:
            samples.append(seconds / self._before)
            self._costs[tree] = median_low(samples)
        self._visit += 1
        cost = self._costs[tree]
        assert cost is not None
        self._paces.append(seconds / cost)
        return seconds / self._before

    def timed(self, tree: int) -> bool:
        """Whether the tree's cost is known from several rounds."""
        return len(self._samples[tree]) >= LEAST_TIMED

    def of(self, tree: int) -> float | None:
        """Cost of a round, expected where it was not measured; None where nothing can be expected."""
        cost = self._costs[tree]
        if cost is not None:
            return cost
        known = sorted((rows, cost) for rows, cost in zip(self._rows, self._costs, strict=True) if cost is not None)
        if not known or known[0][0] == known[-1][0]:
            return None
        (least, short), (most, long) = known[0], known[-1]
        slope = max(long - short, 0.0) / (most - least)
        return max(short + slope * (self._rows[tree] - least), short)
