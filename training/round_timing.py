"""T(N): what a round of N rows costs in plain steps, on the engine and machine at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.rounds import Decoding, TreePlan
from medusa_engine.runtime.tree import Tree

PASSES = 5
ROUNDS = 4  # timed in each pass, behind one that is not


@dataclass(frozen=True)
class RoundCost:
    """Times of a tree's rounds and of plain steps, taken in turn; entry i is the median of pass i, in seconds."""

    rounds: tuple[float, ...]
    steps: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Rounds in units of the plain steps beside them: what else the machine does touches both."""
        return [seconds / step for seconds, step in zip(self.rounds, self.steps, strict=True)]

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def seconds(self) -> float:
        return median(self.rounds)

    @property
    def step_seconds(self) -> float:
        return median(self.steps)


class RoundTimer:
    """Times rounds of an engine, the round loop's own work included.

    Args:
        context: tokens in the cache while rounds are timed; fewer where the cache is too small for it.
    """

    def __init__(self, engine: Engine, context: int) -> None:
        self._engine = engine
        for speculation in (True, False):
            engine.backend.load(speculation=speculation)
        self._most_tokens = (1 + ROUNDS) * (engine.limits.depth + 1)
        room = engine.limits.max_length - self._most_tokens - largest_tree(engine)
        self.context = max(1, min(context, room))
        tokens = np.random.default_rng(0).integers(0, engine.limits.vocab_size, size=self.context)
        self._prompt: list[int] = tokens.tolist()

    def __call__(self, trees: Sequence[Tree]) -> list[RoundCost]:
        plans = [None, *(TreePlan(tree, self._engine.limits) for tree in trees)]
        for plan in plans:
            self._median(plan)  # warms up
        passes = [[self._median(plan) for plan in plans] for _ in range(PASSES)]
        steps, *rounds = (tuple(times) for times in zip(*passes, strict=True))
        return [RoundCost(times, steps) for times in rounds]

    def _median(self, plan: TreePlan | None) -> float:
        decoding = Decoding(
            self._engine.backend.new_state(),
            self._engine.limits,
            self._prompt,
            plan=plan,
            max_new_tokens=self._most_tokens,
            stop_ids=frozenset(),
        )
        times = [round_.seconds for _, round_ in zip(range(1 + ROUNDS), decoding, strict=False)]
        return median(times[1:])


def largest_tree(engine: Engine) -> int:
    """Nodes of the largest tree that is worth a thought: a larger one leaves half the cache unused."""
    return max(2, min(engine.limits.max_tree_nodes, engine.limits.max_length // 2))
