"""Rows go to heads and lookup as whole rounds pay for them, and a token that both propose counts once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from medusa_engine.runtime.tree import LOOKUP, TreePath, parse_tree
from medusa_engine.training.lookup_search import best_orders, mass_beside
from medusa_engine.training.tree_search import MISS, Hits, node_acceptance, replay, replayed_rounds, tree_of

LINE: list[TreePath] = [(LOOKUP,), (LOOKUP, LOOKUP), (LOOKUP,) * 3]


def random_hits(seed: int, answers: int = 3, tokens: int = 40) -> list[Hits]:
    """Two heads of two ranks, and lookups that run for a while where they are right, as a copied text does."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(answers):
        ranks = random.choice([0, 1, MISS], size=(tokens, 2), p=[0.4, 0.2, 0.4])
        runs = np.zeros(tokens, dtype=np.int64)
        for token in range(tokens - 2, -1, -1):
            runs[token] = random.choice([0, runs[token + 1] + 1], p=[0.4, 0.6])
        found.append(Hits(ranks, runs))
    return found


def mean(paths: list[TreePath], answers: list[Hits]) -> float:
    return float(np.mean(replay(tree_of(paths), answers)))


def all_trees(rows: int) -> Iterator[list[TreePath]]:
    ranked = [(0,), (1,), *itertools.product((0, 1), repeat=2)]
    for length in range(min(rows, 4)):
        for heads in itertools.combinations(ranked, rows - 1 - length):
            if all(path[:-1] in heads or len(path) == 1 for path in heads):
                yield [*LINE[:length], *heads]


def test_replay_takes_the_longer_of_heads_and_lookup() -> None:
    tree = parse_tree([[0], [0, 1], ["L"], ["L", "L"], ["L", "L", "L"]], "both")
    ranks = np.array([[0, 1], [5, 5], [5, 5], [0, 0], [5, 5], [5, 5], [5, 5], [0, 1]])
    runs = np.array([2, 0, 0, 9, 0, 0, 0, 1])
    # As long: the heads' path, once. Nine are right, three are asked. The end cuts the last.
    rounds = replayed_rounds(tree, [Hits(ranks, runs)])
    assert rounds == [(3, (0, 1)), (4, (LOOKUP,) * 3), (1, (0, 1))]
    shares = node_acceptance(tree, [Hits(ranks, runs)])
    assert shares == pytest.approx(dict.fromkeys([(0,), (0, 1), *LINE], 1 / 3))
    assert 1 + sum(shares.values()) == pytest.approx(8 / 3)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("counts", ["joint", "marginal"])
def test_trees_publish_about_as_much_as_the_best_of_all(seed: int, counts: str) -> None:
    answers = random_hits(seed)
    orders = best_orders(counts, answers, nodes=6, heads=2, topk=2, lookup=3)
    assert list(orders) == [2, 3, 4, 5, 6]
    for rows, paths in orders.items():
        assert tree_of(paths).nodes == rows
        best = max(mean(each, answers) for each in all_trees(rows))
        assert mean(paths, answers) >= 0.95 * best


def test_lookup_that_finds_what_heads_list_adds_nothing() -> None:
    ranks = np.repeat(np.random.default_rng(1).choice([0, MISS], size=(60, 1)), 2, axis=1)
    both = [Hits(ranks, np.where(ranks[:, 0] == 0, 2, 0))]
    alone = [Hits.of_heads(ranks)]
    assert mean([(0,), (0, 0), *LINE[:2]], both) == mean([(0,), (0, 0)], alone)
    assert mass_beside("joint", both[0], 2, 1)((0,)) == 0.0 < mass_beside("joint", both[0], 2, 0)((0,))
    orders = best_orders("joint", both, nodes=3, heads=2, topk=2, lookup=2)
    assert mean(orders[3], both) == mean([(0,), (0, 0)], alone)


def test_rounds_decide_and_not_positions() -> None:
    """Twelve tokens in a row are found, once: at 11 positions two or more are right, but few rounds begin there.

    Head 0 is right at every fourth of the other tokens; with one more row its rounds outnumber those of the run.
    """
    ranks = np.full((52, 1), MISS)
    ranks[12::4] = 0
    runs = np.append(np.arange(12, 0, -1), np.zeros(40, dtype=np.int64))
    orders = best_orders("joint", [Hits(ranks, runs)], nodes=4, heads=1, topk=1, lookup=3)
    # Two lookup nodes and the head: 4 + 30 rounds; three lookup nodes: 3 + 40.
    assert orders[4] == [*LINE[:2], (0,)]
    assert len(replay(tree_of(orders[4]), [Hits(ranks, runs)])) < len(replay(tree_of(LINE), [Hits(ranks, runs)]))


def test_a_round_publishes_nothing_of_the_next_answer() -> None:
    """Lookup is right behind the last token of each answer, where nothing is left to publish."""
    miss = Hits(np.array([[MISS], [MISS]]), np.array([0, 1]))
    answers = [*[miss] * 4, Hits(np.array([[0], [MISS]]), np.array([0, 0]))]
    assert best_orders("joint", answers, nodes=2, heads=1, topk=1, lookup=1) == {2: [(0,)]}


def test_lookup_alone_is_a_chain_as_long_as_it_pays() -> None:
    answers = [Hits(np.zeros((6, 0), dtype=np.int64), np.array([2, 1, 0, 2, 1, 0]))]
    assert best_orders("joint", answers, nodes=9, heads=0, topk=1, lookup=8) == {2: LINE[:1], 3: LINE[:2]}
    assert best_orders("joint", answers, nodes=9, heads=0, topk=1, lookup=1) == {2: LINE[:1]}
    assert best_orders("joint", answers, nodes=9, heads=0, topk=1, lookup=0) == {}
