"""T(N), E[G] and the speed-up of trees of growing size, and of trees that were named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from medusa_engine.benchmarks.measure import Samples, interleaved, ratio_of
from medusa_engine.benchmarks.passes import FixedContext
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.manifest import Limits
from medusa_engine.runtime.roofline import Measured, Published, pays, speed_up
from medusa_engine.runtime.tree import LOOKUP, Tree, TreePath
from medusa_engine.training.calibration import usable_heads
from medusa_engine.training.lookup_search import best_orders
from medusa_engine.training.tree_search import Hits, best_first_order, replay, tree_of


@dataclass(frozen=True)
class SweepPoint:
    """One tree.

    Attributes:
        tree: whose rounds were timed.
        grown: of the sweep over node counts; False where it was named.
        rounds: T(N), milliseconds.
        overhead: each of those over the plain step beside it.
        published: tokens and rounds that the tree takes for the answers it is judged on.
    """

    tree: Tree
    grown: bool
    rounds: Samples
    overhead: Samples
    published: Published

    @property
    def speed_up(self) -> float:
        """E[G] over the median overhead."""
        return speed_up(self.published, Measured(self.overhead.median)).value

    @property
    def pays(self) -> bool:
        """Break-even: E[G] > T(N) / T(1)."""
        return pays(self.published, Measured(self.overhead.median))


@dataclass(frozen=True)
class Sweep:
    """All trees, timed in turn.

    Attributes:
        context: committed cache rows.
        step: T(1), milliseconds of a plain step.
        points: in the order in which they were asked for.
        grown_on, judged_on: prompts whose answers the trees were grown and judged on.
    """

    context: int
    step: Samples
    points: list[SweepPoint]
    grown_on: int
    judged_on: int

    @property
    def optimum(self) -> SweepPoint:
        """The fastest; of equal ones the first."""
        return max(self.points, key=lambda point: point.speed_up)

    @property
    def grown(self) -> list[SweepPoint]:
        """Those of the sweep over node counts, by nodes."""
        return sorted((point for point in self.points if point.grown), key=lambda point: point.tree.nodes)


def most_nodes(limits: Limits) -> int:
    """Packed rows of the largest tree that an engine can run."""
    paths, layer = limits.lookup, 1
    for _ in range(usable_heads(limits)):
        layer *= limits.topk
        paths += layer
        if paths >= limits.max_tree_nodes:
            break
    return min(1 + paths, limits.max_tree_nodes)


def grow(nodes: int, sequences: Sequence[Hits], limits: Limits) -> Tree:
    """The tree of exactly so many rows that publishes most on these answers (joint counts; lookup by replay).

    Rows beyond what was ever seen to be right hold what is likeliest of the rest: heads first, then lookup.

    Args:
        nodes: at most `most_nodes(limits)`.
        sequences: the answers.
    """
    heads, topk = usable_heads(limits), limits.topk
    orders = best_orders("joint", sequences, nodes=nodes, heads=heads, topk=topk, lookup=limits.lookup)
    seen = set(orders[max(orders)]) if orders else set()
    lookup = sum(LOOKUP in path for path in seen)

    def weight(path: TreePath) -> float:
        return (path in seen) + float(np.prod([0.5 ** (1 + rank) for rank in path]))

    paths = best_first_order(weight, nodes=nodes - lookup, heads=heads, topk=topk)
    chain = [(LOOKUP,) * depth for depth in range(1, nodes - len(paths))]
    return tree_of([*paths, *chain], f"best {nodes}")


def sweep(
    engine: Engine,
    nodes: Sequence[int],
    named: Sequence[Tree],
    sequences: Sequence[Hits],
    *,
    context: int,
    repeats: int,
    progress: Callable[[], None],
) -> Sweep:
    """Time a plain step and a round of every tree in turn, and replay the answers with each tree.

    Trees are grown on every other answer, and all are judged on the others.

    Args:
        nodes: of the trees to grow.
        named: other trees.
        sequences: greedy answers, at least one.
        progress: called behind each sample.
    """
    judged, learned = list(sequences[::2]), list(sequences[1::2]) or list(sequences)
    trees = [*(grow(count, learned, engine.limits) for count in nodes), *named]
    cases = {"plain step": FixedContext(engine, context).sample}
    cases |= {f"{index}": FixedContext(engine, context, tree).sample for index, tree in enumerate(trees)}
    step, *rounds = interleaved(cases, unit="ms", samples=repeats, progress=progress).values()
    points = []
    for index, (tree, taken) in enumerate(zip(trees, rounds, strict=True)):
        named_samples = Samples(f"{tree.name}, {counted(tree.nodes, 'row')}", "ms", taken.values)
        overhead = ratio_of(f"{tree.name} / plain step", taken, step)
        points.append(SweepPoint(tree, index < len(nodes), named_samples, overhead, Published.of(replay(tree, judged))))
    return Sweep(context, step, points, len(learned), len(judged))
