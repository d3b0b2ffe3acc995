"""The tree that publishes most tokens per second on the engine and machine at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.tree import Tree
from medusa_engine.training.lookup_search import best_orders
from medusa_engine.training.round_timing import RoundCost
from medusa_engine.training.tree_search import Hits, replay, tree_of
from medusa_engine.training.tree_settings import COUNTS

BOOTSTRAP = 400
NEAR = 1.01  # sizes that may be faster by less are not looked for
MOST_TIMED = 24
PLAIN_DECODING = Tree((), "plain decoding")

TimeTrees = Callable[[Sequence[Tree]], Sequence[RoundCost]]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Prediction:
    """What a tree is expected to do.

    Attributes:
        tree: two nodes or more. counts: what its paths were weighed with, one of COUNTS.
        published: E[G], tokens a round publishes, the root included.
        cost: of a round.
        speed_up: over plain steps, published / cost.ratio.
        published_interval, speed_up_interval: the middle 90%: other answers, and for the speed-up other timings.
    """

    tree: Tree
    counts: str
    published: float
    cost: RoundCost
    published_interval: Interval
    speed_up_interval: Interval

    @property
    def speed_up(self) -> float:
        return self.published / self.cost.ratio


@dataclass(frozen=True)
class HeadsChoice:
    """The number of heads with which an engine of this model would be fastest, its tree's nodes and its speed-up.

    No heads and one node are plain decoding; no heads and more nodes are lookup alone.
    """

    heads: int
    nodes: int
    speed_up: float


@dataclass(frozen=True)
class EngineSearch:
    """What `search_for_engine` found.

    Attributes:
        best: the fastest tree of two nodes or more; None if neither heads nor lookup were ever seen to be right.
        fewer: the best number of heads for an export.
    """

    best: Prediction | None
    fewer: HeadsChoice

    @property
    def pays(self) -> bool:
        """Whether the best tree is faster than plain decoding."""
        return self.best is not None and self.best.speed_up > 1.0

    @property
    def tree(self) -> Tree:
        """The tree to take: the root alone where plain decoding is faster."""
        return self.best.tree if self.best is not None and self.pays else PLAIN_DECODING


def search_for_engine(
    searched: Sequence[Hits],
    judged: Sequence[Hits],
    *,
    topk: int,
    max_nodes: int,
    lookup: int = 0,
    time_trees: TimeTrees,
    report: Callable[[str], None],
    counts: Sequence[str] = COUNTS,
) -> EngineSearch:
    """Propose trees of every size from some answers, judge them on others, and weigh them with what rounds cost.

    Marginal and joint counts both propose; of equals the marginal ones are taken. Rounds are timed at a few sizes, then
    where one between them could be faster. What is chosen is timed once more for the prediction.

    Args:
        searched, judged: answers.
        max_nodes: of the largest tree.
        lookup: lookup nodes that a tree may have.
        time_trees: measures their rounds.
        report: called with a line for each measured size.
        counts: which of COUNTS propose.
    """
    heads = searched[0].ranks.shape[1]
    trees = {
        (name, nodes): tree_of(paths)
        for name in counts
        for nodes, paths in best_orders(name, searched, nodes=max_nodes, heads=heads, topk=topk, lookup=lookup).items()
    }
    if not trees:
        report(f"the heads{' and lookup' if lookup else ''} were never right: plain decoding")
        return EngineSearch(None, HeadsChoice(0, 1, 1.0))
    published = {key: float(np.mean(replay(tree, judged))) for key, tree in trees.items()}
    by_nodes = {nodes: tree for (_, nodes), tree in trees.items()}
    most = {size: max(mean for (_, nodes), mean in published.items() if nodes == size) for size in by_nodes}
    costs: dict[int, RoundCost] = {}
    new = [nodes for nodes in grid(max(by_nodes)) if nodes in by_nodes]
    while new:
        costs |= dict(zip(new, time_trees([by_nodes[nodes] for nodes in new]), strict=True))
        for nodes in new:
            report(_line(nodes, costs[nodes], {name: published.get((name, nodes)) for name in COUNTS}))
        new = refinement({nodes: cost.ratio for nodes, cost in costs.items()}, most)
    timed = [key for key in trees if key[1] in costs]
    best = max(timed, key=lambda key: published[key] / costs[key[1]].ratio)  # the first of equals
    chosen, _ = best
    again = time_trees([trees[best]] * 3)  # of many noisy times, the best is too good
    return EngineSearch(
        _predict(trees[best], chosen, RoundCost.joined(again), judged),
        _best_heads(
            searched,
            judged,
            chosen,
            costs,
            per_head=_cost_of_a_head(heads, {nodes: costs[nodes] for nodes in costs if by_nodes[nodes].heads}),
            topk=topk,
            nodes=max(by_nodes),
            lookup=lookup,
        ),
    )


def grid(most: int) -> list[int]:
    """Sizes to time first: 2, 3, 4, 6, 8, 12 ... and the largest."""
    sizes = {most}
    for power in range(1, most.bit_length() + 1):
        sizes |= {1 << power, 3 << (power - 1)}
    return sorted(size for size in sizes if 2 <= size <= most)


def refinement(ratios: Mapping[int, float], published: Mapping[int, float]) -> list[int]:
    """A size to time next, or none if no other can be much faster than the best that was timed.

    A round of more rows costs no less, so a size is at best as cheap as the largest timed one below it. T(N) may have
    steps, where a kernel's tiles are full: in the gap that holds the most promising size, the middle is timed next.

    Args:
        ratios: cost of the sizes that were timed, the smallest and the largest among them.
        published: E[G] of every size.
    """
    best = max(published[size] / ratio for size, ratio in ratios.items())
    gaps = {size: max(timed for timed in ratios if timed < size) for size in published.keys() - ratios.keys()}
    promising = max(gaps, key=lambda size: published[size] / ratios[gaps[size]], default=None)
    if promising is None or len(ratios) >= MOST_TIMED or published[promising] / ratios[gaps[promising]] <= NEAR * best:
        return []
    return [(gaps[promising] + min(size for size in ratios if size > promising)) // 2]


def interpolated(costs: dict[int, RoundCost], nodes: int) -> float:
    """Cost of a round of that many rows in plain steps, linear between the measured sizes."""
    sizes = sorted(costs)
    return float(np.interp(nodes, sizes, [costs[size].ratio for size in sizes]))


def _predict(tree: Tree, counts: str, cost: RoundCost, judged: Sequence[Hits]) -> Prediction:
    rounds = [replay(tree, [hits]) for hits in judged]
    random = np.random.default_rng(0)
    published, speed_ups = [], []
    for _ in range(BOOTSTRAP):
        drawn = random.integers(0, len(rounds), size=len(rounds))
        published.append(sum(sum(rounds[index]) for index in drawn) / sum(len(rounds[index]) for index in drawn))
        ratios = random.choice(cost.ratios, size=len(cost.ratios))
        speed_ups.append(published[-1] / float(np.median(ratios)))
    mean = float(np.mean([count for counts in rounds for count in counts]))
    return Prediction(tree, counts, mean, cost, middle(published), middle(speed_ups))


def middle(samples: Sequence[float]) -> Interval:
    """The middle 90%."""
    low, high = np.quantile(samples, (0.05, 0.95))
    return float(low), float(high)


def _cost_of_a_head(heads: int, costs: Mapping[int, RoundCost]) -> float:
    """In plain steps, from the smallest measured round with heads: at most what it takes longer than a plain step."""
    return max(0.0, costs[min(costs)].ratio - 1.0) / heads if costs else 0.0


def _best_heads(
    searched: Sequence[Hits],
    judged: Sequence[Hits],
    counts: str,
    costs: dict[int, RoundCost],
    *,
    per_head: float,
    topk: int,
    nodes: int,
    lookup: int,
) -> HeadsChoice:
    """The best number of heads to export, estimated.

    All heads of an engine run in every round that proposes any of their tokens, the tree's depth notwithstanding.
    """
    heads = searched[0].ranks.shape[1]
    best = HeadsChoice(0, 1, 1.0)
    for fewer in range(0 if lookup else 1, heads + 1):
        orders = best_orders(counts, searched, nodes=nodes, heads=fewer, topk=topk, lookup=lookup)
        for size, paths in orders.items():
            cost = max(1.0, interpolated(costs, size) - (heads - fewer) * per_head)
            speed_up = float(np.mean(replay(tree_of(paths), judged))) / cost
            if speed_up > best.speed_up:
                best = HeadsChoice(fewer, size, speed_up)
    return best


def _line(nodes: int, cost: RoundCost, published: dict[str, float | None]) -> str:
    line = f"{counted(nodes, 'node'):>10}  {1000 * cost.seconds:7.1f} ms, {cost.ratio:.2f} plain steps"
    for counts, mean in published.items():
        if mean is not None:
            line += f"   {counts}: E[G] {mean:.3f}, {mean / cost.ratio:.3f} x"
    return line
