"""Search trees of heads and lookup together: rows go where rounds publish most, replayed on recorded answers.

A tree's lookup nodes are one chain, so its length is tried out: beside a chain, a head's path weighs what lookup does
not publish anyway. Which length is best is a question of whole rounds, not of positions: a long run of lookup is right
at all of its positions, but one round publishes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from medusa_engine.runtime.tree import LOOKUP, TreePath
from medusa_engine.training.tree_search import Hits, Mass, best_first_order, path_mass


def mass_beside(counts: str, hits: Hits, topk: int, lookup: int) -> Mass:
    """What a head's path adds to E[G] beside so many lookup nodes: `path_mass` where lookup is right less far."""
    by_depth: list[tuple[float, Mass | None]] = []
    for depth in range(1, lookup + 1):
        left = hits.runs < depth
        share = float(left.mean())
        by_depth.append((share, path_mass(counts, hits.ranks[left], topk) if share else None))
    alone = path_mass(counts, hits.ranks, topk)

    def weight(path: TreePath) -> float:
        if len(path) > lookup:
            return alone(path)
        share, mass = by_depth[len(path) - 1]
        return share * mass(path) if mass is not None else 0.0

    return weight


def best_orders(
    counts: str, answers: Sequence[Hits], *, nodes: int, heads: int, topk: int, lookup: int
) -> dict[int, list[TreePath]]:
    """The paths of the best tree of every size up to `nodes` rows, root included, that there is.

    Args:
        answers: weighed, and replayed to choose the number of lookup nodes; of equals the fewest.
        lookup: lookup nodes at most.

    Returns:
        By rows, 2 or more: lookup nodes, then paths of ranks in the order in which they are chosen.
    """
    hits = Hits.joined(answers)
    most = min(lookup, nodes - 1, int(hits.runs.max()))
    best: dict[int, tuple[float, list[TreePath]]] = {}
    for length in range(most + 1):
        chain: list[TreePath] = [(LOOKUP,) * depth for depth in range(1, length + 1)]
        mass = mass_beside(counts, hits, topk, min(length, heads))
        order = best_first_order(mass, nodes=nodes - length, heads=heads, topk=topk)
        for taken, published in enumerate(_published(order, answers, length) if most else [0.0] * (len(order) + 1)):
            rows = 1 + length + taken
            if rows > 1 and published > best.get(rows, (-1.0, []))[0]:
                best[rows] = published, chain + order[:taken]
    return {rows: paths for rows, (_, paths) in sorted(best.items())}


def _published(order: Sequence[TreePath], answers: Sequence[Hits], lookup: int) -> list[float]:
    """E[G] of a chain of lookup nodes with the first 0, 1, 2, ... of these paths, as `replay` has it."""
    hits = Hits.joined(answers)
    ends = np.cumsum([len(answer.runs) for answer in answers]).tolist()
    edges = np.minimum(hits.runs, lookup)  # [positions], accepted there
    found = []
    for path in ((), *order):
        accepted = (hits.ranks[:, : len(path)] == np.array(path, dtype=np.int64)).all(axis=1)
        edges[accepted] = np.maximum(edges[accepted], len(path))
        steps, rounds, position = (1 + edges).tolist(), 0, 0
        for end in ends:
            while position < end:
                position += steps[position]
                rounds += 1
            position = end  # the last round is cut there
        found.append(ends[-1] / rounds)
    return found
