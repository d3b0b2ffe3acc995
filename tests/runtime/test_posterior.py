"""Sampled, typical and rejection acceptance in numpy: worked rounds, and faults that each of them tells apart."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_strategies import trees

from medusa_engine.runtime.posterior import Accepted, accept_rejection, accept_sample, accept_typical
from medusa_engine.runtime.tree_buffers import compile_tree

DATA = Path(__file__).parents[1] / "data"
ORACLES: dict[str, Any] = json.loads((DATA / "oracles" / "worked_examples.json").read_text())
NINE: dict[str, Any] = ORACLES["nine_row_tree"]
TOKENS, RETRIEVE = np.array(NINE["packed_tokens"]), np.array(NINE["retrieve_indices"])
VOCAB = 100
EPSILON, ALPHA = 0.09, 0.3  # of the paper's tuned setting

Floats = npt.NDArray[np.float64]
Summary = tuple[int, list[int], list[int], int]


def summary(accepted: Accepted) -> Summary:
    length = int(accepted.accepted_suffix_length)
    assert (accepted.path_rows[length + 1 :] == -1).all()
    assert (accepted.published_tokens[length + 1 :] == -1).all()
    rows, tokens = accepted.path_rows[: length + 1], accepted.published_tokens[: length + 1]
    return length, rows.tolist(), tokens.tolist(), int(accepted.next_root)


def oracle(name: str, next_root: int) -> Summary:
    worked = ORACLES[name]
    tokens = worked.get("published_tokens") or worked["winning_tokens"]
    return worked["accepted_suffix_length"], worked.get("winning_rows", [0]), tokens, next_root


# Sample


def test_the_walk_follows_the_drawn_tokens_of_the_worked_round() -> None:
    drawn = np.full(9, 99)
    for row, token in ORACLES["greedy_round"]["target_argmax_by_row"].items():
        drawn[int(row)] = token
    drawn[3] = 77
    assert summary(accept_sample(TOKENS, drawn, RETRIEVE)) == oracle("greedy_round", 77)


def test_where_no_child_carries_the_drawn_token_it_is_the_next_root() -> None:
    drawn = np.full(9, 31)  # rows 1 and 2 have a child with it, but the walk never comes there
    assert summary(accept_sample(TOKENS, drawn, RETRIEVE)) == oracle("no_suffix_accepted", 31)


# Typical


def distribution(likely: dict[int, float], *, rest: int) -> Floats:
    """[V] with the given probabilities, and what is left of 1 spread over `rest` tokens that no row carries."""
    row = np.zeros(VOCAB)
    row[50 : 50 + rest] = (1 - sum(likely.values())) / rest
    for token, probability in likely.items():
        row[token] = probability
    return row


def nine_rows(by_row: dict[int, dict[int, float]], *, rest: int = 5) -> Floats:
    """[9, V]; a row that is not named likes no token of the tree."""
    return np.stack([distribution(by_row.get(row, {}), rest=rest) for row in range(9)])


# name -> probabilities [9, V], epsilon, alpha, what is accepted; worked by hand: entropies are of two to six tokens
Typical = tuple[Floats, float, float, tuple[int, list[int]]]
CASES: dict[str, Typical] = {
    # (0.1, 0.95) and (0.5, 0.5): the second has the larger product, the first the larger sum
    "worked typical round": (
        nine_rows({0: {21: 0.1, 22: 0.5}, 1: {31: 0.95}, 2: {31: 0.5}}, rest=1),
        EPSILON,
        ALPHA,
        (2, [0, 2, 6]),
    ),
    "no suffix": (nine_rows({}), EPSILON, ALPHA, (0, [0])),
    # Uniform over four tokens: exp(-H) = 1/4, so alpha * exp(-H) = 0.25 with alpha 1
    "as likely as epsilon": (nine_rows({0: {21: 0.25}}, rest=3), 0.25, 9.0, (0, [0])),
    "as likely as alpha times exp of minus entropy": (nine_rows({0: {21: 0.5, 22: 0.5}}), 0.9, 1.0, (0, [0])),
    "below alpha alone": (nine_rows({0: {21: 0.25}}, rest=3), 0.9, 0.9, (1, [0, 1])),  # 0.25 > 0.9 / 4
    "above epsilon alone": (nine_rows({0: {21: 0.25}}, rest=3), 0.2, 9.0, (1, [0, 1])),
    "only a later edge": (nine_rows({1: {31: 0.9}, 2: {32: 0.9}}, rest=1), EPSILON, ALPHA, (0, [0])),
    "of one edge the likelier": (nine_rows({0: {21: 0.2, 22: 0.4}}, rest=1), EPSILON, ALPHA, (1, [0, 2])),
    # 21 is likelier, but the path of 22 is longer
    "longer before likelier": (nine_rows({0: {21: 0.6, 22: 0.2}, 2: {33: 0.2}}), EPSILON, ALPHA, (2, [0, 2, 8])),
}


def run_typical(case: Typical) -> Summary:
    probabilities, epsilon, alpha, _ = case
    return summary(
        accept_typical(
            TOKENS,
            probabilities,
            np.arange(60, 69),
            RETRIEVE,
            posterior_threshold=epsilon,
            posterior_alpha=alpha,
        )
    )


def expected(case: Typical) -> Summary:
    length, rows = case[3]
    return length, rows, TOKENS[rows].tolist(), 60 + rows[-1]


@pytest.mark.parametrize("name", CASES)
def test_typical_acceptance_equals_the_worked_case(name: str) -> None:
    assert run_typical(CASES[name]) == expected(CASES[name])


def test_the_worked_typical_rounds_are_the_oracles() -> None:
    assert run_typical(CASES["worked typical round"]) == oracle("fast_typical_round", 66)
    assert run_typical(CASES["no suffix"]) == oracle("no_suffix_accepted", 60)


def typical_path_by_path(
    tokens: Any, probabilities: Floats, retrieve: Any, epsilon: float, alpha: float, fault: str = ""
) -> tuple[int, list[int]]:
    """Typical acceptance one path at a time, with one fault."""
    best: tuple[int, float, list[int]] = (-1, 0.0, [])
    for path in retrieve.tolist():
        passed, logs = [], []
        for parent, child in pairwise(path):
            if child < 0:
                break
            p = probabilities[parent]
            entropy = -sum(x * np.log(x) for x in p if x > 0)
            bounds = epsilon, alpha * np.exp(entropy if fault == "entropy sign" else -entropy)
            threshold = max(bounds) if fault == "max" else min(bounds)
            likely = p[tokens[child]]
            passed.append(likely >= threshold - 1e-12 if fault == ">=" else likely > threshold)
            logs.append(likely if fault == "raw" else np.log(likely) if likely > 0 else -np.inf)
        length = sum(passed) if fault == "not a prefix" else (*passed, False).index(False)
        score = 0.0 if fault == "first path" else sum(logs if fault == "whole path" else logs[:length])
        if length > best[0] or (length == best[0] and score > best[1]):
            best = length, score, path[: length + 1]
    return best[0], best[2]


FAULTS = {
    "max": "below alpha alone",
    "entropy sign": "below alpha alone",
    "not a prefix": "only a later edge",
    "raw": "worked typical round",
    ">=": "as likely as epsilon",
    "first path": "of one edge the likelier",
}


@pytest.mark.parametrize("name", CASES)
def test_the_path_by_path_implementation_without_a_fault_is_right(name: str) -> None:
    probabilities, epsilon, alpha, worked = CASES[name]
    assert typical_path_by_path(TOKENS, probabilities, RETRIEVE, epsilon, alpha) == worked


@pytest.mark.parametrize(("fault", "name"), FAULTS.items())
def test_a_case_tells_the_fault_from_right_acceptance(fault: str, name: str) -> None:
    probabilities, epsilon, alpha, worked = CASES[name]
    assert typical_path_by_path(TOKENS, probabilities, RETRIEVE, epsilon, alpha, fault) != worked


@settings(deadline=None)
@given(data=st.data())
def test_typical_acceptance_equals_the_path_by_path_implementation(data: Any) -> None:
    tree = data.draw(trees(depth=3, topk=3, max_nodes=12))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    tokens = generator.integers(0, 5, (2, tree.nodes))
    probabilities = generator.dirichlet(np.full(5, 0.5), (2, tree.nodes))
    retrieve = compile_tree(tree, topk=3, depth=3).retrieve_indices
    epsilon, alpha = generator.uniform(0, 0.5), generator.uniform(0, 1)
    accepted = accept_typical(
        tokens, probabilities, tokens, retrieve, posterior_threshold=epsilon, posterior_alpha=alpha
    )
    for round_ in range(2):  # both at once
        length, rows = typical_path_by_path(tokens[round_], probabilities[round_], retrieve, epsilon, alpha)
        one = Accepted(*(field[round_] for field in accepted))
        assert summary(one) == (length, rows, tokens[round_][rows].tolist(), tokens[round_][rows[-1]])


# Rejection


def test_a_draft_is_rejected_in_proportion_and_corrected_from_what_the_head_lacks() -> None:
    p = np.array([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])  # behind the root, behind the draft
    q = np.array([[0.25, 0.0, 0.75]])
    for draft, uniform, correct, outcome in (
        (0, 0.99, 0.2, (1, [0, 1], [7, 0], 1)),  # p > q: accepted always; 0.2 of (0.2, 0.3, 0.5) is still token 1
        (2, 1e-6, 0.4, (0, [0], [7], 1)),  # p = 0: never; max(0, p - q) = (0.25, 0.5, 0), of which token 0 is a third
        (2, 1e-6, 0.3, (0, [0], [7], 0)),
    ):
        accepted = accept_rejection(np.array(7), np.array([draft]), p, q, np.array([uniform]), np.full(2, correct))
        assert summary(accepted) == outcome
