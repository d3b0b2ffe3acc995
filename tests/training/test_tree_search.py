"""The search finds the worked tree, weights are increments, and replay counts what rounds would publish."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_engine.runtime.tree import Tree, parse_tree
from medusa_engine.training.tree_search import (
    END,
    MISS,
    Hits,
    best_first,
    expected_published,
    joint_mass,
    marginal_mass,
    mass_from_cumulative,
    node_acceptance,
    rank_mass,
    replay,
)

ORACLES: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "oracles" / "worked_examples.json").read_text(encoding="utf-8")
)


def test_worked_search_selects_the_worked_nodes() -> None:
    oracle = ORACLES["greedy_tree_search"]
    mass = marginal_mass(np.array(oracle["rank_mass"]))
    tree = best_first(mass, nodes=oracle["budget"] + 1, heads=3, topk=4)
    selected = [tuple(path) for path, _ in oracle["selected_in_order"]]
    assert set(tree.paths) == set(selected)
    for path, weight in oracle["selected_in_order"]:
        assert mass(tuple(path)) == pytest.approx(weight)
    assert expected_published(tree, mass) - 1 == pytest.approx(oracle["expected_accepted_suffix"])


@pytest.mark.parametrize("budget", range(1, 11))
def test_worked_search_selects_in_the_worked_order(budget: int) -> None:
    oracle = ORACLES["greedy_tree_search"]
    tree = best_first(marginal_mass(np.array(oracle["rank_mass"])), nodes=budget + 1, heads=3, topk=4)
    assert set(tree.paths) == {tuple(path) for path, _ in oracle["selected_in_order"][:budget]}


def test_rank_mass_is_the_increment_of_accuracy() -> None:
    oracle = ORACLES["rank_mass_from_cumulative"]
    assert mass_from_cumulative(np.array(oracle["top_i_accuracy"])) == pytest.approx(np.array(oracle["rank_mass"]))


def test_rank_mass_counts_each_rank_of_each_head() -> None:
    ranks = np.array([[0, 1], [0, MISS], [2, 1], [MISS, 0]])
    assert rank_mass(ranks, 3) == pytest.approx(np.array([[0.5, 0.0, 0.25], [0.25, 0.5, 0.0]]))


def test_joint_weight_of_a_path_needs_every_rank_at_one_position() -> None:
    mass = joint_mass(np.array([[0, 1], [0, MISS], [1, 1], [MISS, 1]]))
    assert [mass(path) for path in ((0,), (0, 1), (1,), (1, 1), (2,))] == [0.5, 0.25, 0.25, 0.25, 0.0]


@given(st.lists(st.lists(st.integers(MISS, 2), min_size=2, max_size=2), min_size=1, max_size=12), st.integers(1, 13))
def test_no_tree_of_that_size_has_more_joint_weight(vectors: list[list[int]], nodes: int) -> None:
    mass = joint_mass(np.array(vectors))
    found = expected_published(best_first(mass, nodes=nodes, heads=2, topk=3), mass)
    # Two levels of three ranks: for a set of first-level nodes, the best children are the heaviest below them.
    best = 1.0
    for count in range(min(3, nodes - 1) + 1):
        for first in itertools.combinations(range(3), count):
            below = sorted((mass((a, b)) for a in first for b in range(3)), reverse=True)
            best = max(best, 1.0 + sum(mass((a,)) for a in first) + sum(below[: nodes - 1 - count]))
    assert found == pytest.approx(best)


def test_replay_goes_on_behind_what_a_round_published() -> None:
    tree = parse_tree([[0], [0, 1], [1]], "tree")
    hits = Hits.of_heads(np.array([[0, 1], [5, 5], [5, 5], [1, 0], [0, 0], [MISS, 0], [0, 1]]))
    # [0,1] accepts two; [1] accepts one and [1,0] is not in the tree; then a miss; the last is cut at the end.
    assert replay(tree, [hits]) == [3, 2, 1, 1]
    assert sum(replay(tree, [hits, hits])) == 2 * len(hits.ranks)


def test_replay_of_the_root_alone_publishes_one_token_a_round() -> None:
    assert replay(Tree(()), [Hits.of_heads(np.zeros((4, 2), dtype=np.int64))]) == [1, 1, 1, 1]


def test_nodes_are_accepted_where_a_round_begins() -> None:
    # First answer: one round accepts (0, 1) and publishes 3, one publishes the last token. Second: 1, then (0) and its
    # root. The third ends before what its round accepts.
    vectors = [[[0, 1], [1, 0], [0, END], [END, END]], [[MISS, 0], [0, 0], [MISS, END]], [[0, 1]]]
    shares = node_acceptance(parse_tree([[0], [0, 1]], "three"), [Hits.of_heads(np.array(each)) for each in vectors])
    assert shares == {(0,): 2 / 5, (0, 1): 1 / 5}
    assert 1 + sum(shares.values()) == (4 + 3 + 1) / 5
