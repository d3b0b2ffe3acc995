"""T(N): what a round of N rows costs in plain steps, on the engine and machine at hand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import Limits
from medusa_engine.runtime.rounds import Decoding
from medusa_engine.runtime.tree import Tree
from medusa_engine.runtime.tree_plan import TreePlan

ROUNDS = 4  # timed in each pass at most, behind one that is not
LEAST_PASSES, MOST_PASSES = 5, 50
LEAST_SECONDS = 1.0  # of all passes, where there are not enough passes


@dataclass(frozen=True)
class RoundCost:
    """Times of a tree's rounds and of plain steps, taken in turn; entry i is the median of pass i, in seconds."""

    rounds: tuple[float, ...]
    steps: tuple[float, ...]

    @classmethod
    def joined(cls, costs: Sequence[RoundCost]) -> RoundCost:
        """The passes of several measurements of one tree."""
        rounds = tuple(seconds for cost in costs for seconds in cost.rounds)
        return cls(rounds, tuple(seconds for cost in costs for seconds in cost.steps))

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

    Raises:
        UserError: the cache has no room for a few rounds.
    """

    def __init__(self, engine: Engine, context: int) -> None:
        self._engine = engine
        limits = engine.limits
        published = limits.depth + 1  # tokens of a round at most
        self._rounds = max(1, min(ROUNDS, limits.max_length // 2 // published - 2))
        self._most_tokens = (1 + self._rounds) * published
        room = limits.max_length - self._most_tokens - largest_tree(limits)  # a tree without room shrinks
        if room < 1:
            raise UserError(
                f"{engine.manifest.name}: a cache of {counted(limits.max_length, 'token')} is too small to time rounds"
                " in",
                "export with a larger medusa-export --max-length",
            )
        self.context = min(context, room)
        for speculation in (True, False):
            engine.backend.load(speculation=speculation)
        tokens = np.random.default_rng(0).integers(0, limits.vocab_size, size=self.context)
        self._prompt: list[int] = tokens.tolist()

    def __call__(self, trees: Sequence[Tree]) -> list[RoundCost]:
        plans = [None, *(TreePlan(tree, self._engine.limits) for tree in trees)]
        for plan in plans:
            self._median(plan)  # warms up
        passes: list[list[float]] = []
        started = time.perf_counter()
        while len(passes) < LEAST_PASSES or (
            len(passes) < MOST_PASSES and time.perf_counter() - started < LEAST_SECONDS
        ):
            passes.append([self._median(plan) for plan in plans])
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
        times = [round_.seconds for _, round_ in zip(range(1 + self._rounds), decoding, strict=False)]
        return median(times[1:])


def largest_tree(limits: Limits) -> int:
    """Nodes of the largest tree that is worth a thought: a larger one leaves less than half of the cache to answers."""
    return min(limits.max_tree_nodes, limits.max_length // 2)
