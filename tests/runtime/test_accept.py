from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_invariants import prefix_closure

from medusa_engine.runtime.accept import Acceptance, accept_greedy
from medusa_engine.runtime.tree import parse_tree
from medusa_engine.runtime.tree_buffers import compile_tree

DATA = Path(__file__).parents[1] / "data"
ORACLES: dict[str, Any] = json.loads((DATA / "oracles" / "worked_examples.json").read_text())
NINE: dict[str, Any] = ORACLES["nine_row_tree"]
NO_CHILD = 999  # a prediction that no packed token equals

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Case:
    input_ids: list[int]
    predicted: dict[int, int]  # by packed row; other rows predict NO_CHILD
    retrieve: list[list[int]]
    path_rows: list[int]  # of the published tokens
    published: list[int]

    def arrays(self) -> tuple[Ints, Ints, Ints]:
        predicted = [self.predicted.get(row, NO_CHILD) for row in range(len(self.input_ids))]
        return np.array(self.input_ids), np.array(predicted), np.array(self.retrieve)


GREEDY = ORACLES["greedy_round"]
SECOND_BRANCH = ORACLES["fast_typical_round"]  # its winning path, here chosen by the argmax
NONE_ACCEPTED = ORACLES["no_suffix_accepted"]
UNEVEN = [[0, 2, -1], [0, 1, 3]]  # paths (0), (1), (0, 0): the leaf (1) is row 2 and the last row is 3

CASES = {
    "worked greedy round": Case(
        NINE["packed_tokens"],
        {int(row): token for row, token in GREEDY["target_argmax_by_row"].items()} | {3: 77, 8: 78},
        NINE["retrieve_indices"],
        GREEDY["winning_rows"],
        GREEDY["published_tokens"],
    ),
    "second branch": Case(
        NINE["packed_tokens"],
        {0: 22, 2: 31, 6: 50},
        NINE["retrieve_indices"],
        SECOND_BRANCH["winning_rows"],
        SECOND_BRANCH["winning_tokens"],
    ),
    "no suffix": Case(
        NINE["packed_tokens"], {0: 500}, NINE["retrieve_indices"], [0], NONE_ACCEPTED["published_tokens"]
    ),
    "only a later edge matches": Case(NINE["packed_tokens"], {0: 500, 1: 31}, NINE["retrieve_indices"], [0], [11]),
    "half of a path": Case(NINE["packed_tokens"], {0: 21}, NINE["retrieve_indices"], [0, 1], [11, 21]),
    # Token 0 is predicted at the shallow leaf and is the token of the last row, which -1 would read.
    "token 0 after a shallow leaf": Case([11, 21, 22, 0], {0: 22, 2: 0}, UNEVEN, [0, 2], [11, 22]),
    "the root's token after a shallow leaf": Case([11, 21, 22, 0], {0: 22, 2: 11}, UNEVEN, [0, 2], [11, 22]),
    "siblings with one token": Case([11, 21, 21, 31, 32], {0: 21}, [[0, 1, 3], [0, 2, 4]], [0, 1], [11, 21]),
    "root alone": Case([11], {0: 21}, [[0, -1, -1]], [0], [11]),
    "root alone without heads": Case([11], {0: 21}, [[0]], [0], [11]),
    "root in row 2": Case([31, 21, 11], {2: 21, 1: 31, 0: 8}, [[2, 1, 0]], [2, 1, 0], [11, 21, 31]),
}


def summary(acceptance: Acceptance) -> tuple[Any, ...]:
    return (
        acceptance.accepted_suffix_length,
        acceptance.published_count,
        acceptance.path_rows.tolist(),
        acceptance.published_tokens.tolist(),
        acceptance.winning_row,
        acceptance.next_root,
    )


def expected_summary(case: Case) -> tuple[Any, ...]:
    count = len(case.published)
    padding = [-1] * (len(case.retrieve[0]) - count)
    frontier = case.path_rows[-1]
    next_root = case.predicted.get(frontier, NO_CHILD)
    return count - 1, count, case.path_rows + padding, case.published, frontier, next_root


@pytest.mark.parametrize("name", CASES)
def test_acceptance_equals_the_worked_case(name: str) -> None:
    assert summary(accept_greedy(*CASES[name].arrays())) == expected_summary(CASES[name])


def test_the_worked_greedy_round_counts_edges_and_published_tokens_apart() -> None:
    acceptance = accept_greedy(*CASES["worked greedy round"].arrays())
    assert acceptance.accepted_suffix_length == GREEDY["accepted_suffix_length"]
    assert acceptance.published_count == GREEDY["published_count"]
    assert acceptance.next_root == 77


def test_no_accepted_suffix_still_publishes_the_root() -> None:
    acceptance = accept_greedy(*CASES["no suffix"].arrays())
    assert acceptance.accepted_suffix_length == NONE_ACCEPTED["accepted_suffix_length"]
    assert acceptance.published_count == NONE_ACCEPTED["published_count"]
    assert (acceptance.winning_row, acceptance.next_root) == (0, 500)


def test_accepted_rows_are_committed_from_the_worked_cache_rows() -> None:
    acceptance = accept_greedy(*CASES["second branch"].arrays())
    past_length, count = NINE["prefix_length"], acceptance.published_count
    assert (past_length + acceptance.path_rows[:count]).tolist() == SECOND_BRANCH["source_rows"]
    assert (past_length + np.arange(count)).tolist() == SECOND_BRANCH["destination_rows"]
    assert past_length + count == SECOND_BRANCH["new_length"]
    assert acceptance.winning_row == SECOND_BRANCH["frontier_row"]
    assert acceptance.next_root == 50


@pytest.mark.parametrize(
    ("input_ids", "predicted", "retrieve", "words"),
    [
        ([[1]], [[1]], [[0]], "not both"),
        ([1, 2], [1], [[0]], "not both"),
        ([1], [1], [0], "retrieve_indices"),
        ([1], [1], np.zeros((0, 2), dtype=np.int64), "retrieve_indices"),
        ([1], [1], [[0, 1]], "outside -1 … 0"),
        ([1], [1], [[0, -2]], "outside -1 … 0"),
        ([1, 2], [1, 2], [[0, 1], [1, -1]], "one root row"),
        ([1, 2], [1, 2], [[-1, 1]], "one root row"),
    ],
)
def test_buffers_that_do_not_belong_together_are_refused(
    input_ids: Any, predicted: Any, retrieve: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        accept_greedy(np.array(input_ids), np.array(predicted), np.array(retrieve))


# Faults, each in an implementation that is right without it


# What each fault takes for the token of row -1
SENTINEL_FAULTS: dict[str, Callable[[Ints], Any]] = {
    "sentinel reads the last row": lambda input_ids: input_ids[-1],
    "sentinel reads row 0": lambda input_ids: input_ids[0],
    "sentinel reads token 0": lambda input_ids: 0,
}


def accept_path_by_path(input_ids: Ints, predicted: Ints, retrieve: Ints, fault: str = "") -> tuple[Any, ...]:
    """Greedy acceptance one path at a time, with one fault; gives what `summary` gives."""
    best_length, best = -1, 0
    for index, path in enumerate(retrieve.tolist()):
        matched = []
        for parent, child in pairwise(path):
            if child < 0 and fault not in SENTINEL_FAULTS:
                break
            token = SENTINEL_FAULTS[fault](input_ids) if child < 0 else input_ids[child]
            judge = child if fault == "judged by its own row" else parent
            matched.append(bool(token == predicted[judge]))
        length = sum(matched) if fault == "any edges count" else (*matched, False).index(False)
        if length > best_length or (fault == "last of equal paths" and length == best_length):
            best_length, best = length, index
    count = best_length if fault == "publishes the suffix alone" else best_length + 1
    rows = retrieve[best, :count].tolist()
    tokens = input_ids[rows].tolist() if rows else []
    if fault == "commits by length":
        rows = list(range(count))
    if fault == "rows of another path":
        rows = retrieve[0, :count].tolist()
    frontier = retrieve[best, best_length - (fault == "frontier is the predecessor")]
    padded = rows + [-1] * (retrieve.shape[1] - count)
    return best_length, count, padded, tokens, int(frontier), int(predicted[frontier])


FAULTS = {
    "judged by its own row": "worked greedy round",
    "publishes the suffix alone": "worked greedy round",
    "commits by length": "worked greedy round",
    "rows of another path": "second branch",
    "frontier is the predecessor": "worked greedy round",
    "sentinel reads the last row": "token 0 after a shallow leaf",
    "sentinel reads row 0": "the root's token after a shallow leaf",
    "sentinel reads token 0": "token 0 after a shallow leaf",
    "any edges count": "only a later edge matches",
    "last of equal paths": "siblings with one token",
}


@pytest.mark.parametrize("name", CASES)
def test_the_path_by_path_implementation_without_a_fault_is_right(name: str) -> None:
    assert accept_path_by_path(*CASES[name].arrays()) == expected_summary(CASES[name])


@pytest.mark.parametrize(("fault", "name"), FAULTS.items())
def test_a_case_tells_the_fault_from_right_acceptance(fault: str, name: str) -> None:
    faulty = accept_path_by_path(*CASES[name].arrays(), fault)
    assert faulty != expected_summary(CASES[name])
    assert faulty != summary(accept_greedy(*CASES[name].arrays()))


def test_the_sentinel_case_would_accept_one_edge_too_many() -> None:
    name = "token 0 after a shallow leaf"
    faulty = accept_path_by_path(*CASES[name].arrays(), "sentinel reads the last row")
    assert faulty[0] == accept_greedy(*CASES[name].arrays()).accepted_suffix_length + 1


# Properties on random trees


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Ints, Ints, Ints]:
    """A random tree with few distinct tokens, so that matches, ties and token 0 are common."""
    paths = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=8))
    tree = parse_tree(sorted(prefix_closure(paths)), "a test")
    buffers = compile_tree(tree, topk=3, depth=tree.depth + draw(st.integers(0, 1)))
    tokens = st.lists(st.integers(0, 2), min_size=tree.nodes, max_size=tree.nodes)
    return np.array(draw(tokens)), np.array(draw(tokens)), buffers.retrieve_indices


@settings(deadline=None)
@given(rounds())
def test_acceptance_equals_the_path_by_path_implementation(arrays: tuple[Ints, Ints, Ints]) -> None:
    assert summary(accept_greedy(*arrays)) == accept_path_by_path(*arrays)


@settings(deadline=None)
@given(rounds(), st.randoms(use_true_random=False))
def test_renumbering_the_packed_rows_changes_only_the_rows(arrays: tuple[Ints, Ints, Ints], random: Any) -> None:
    input_ids, predicted, retrieve = arrays
    order = list(range(len(input_ids)))  # old row of each new row
    random.shuffle(order)
    new_row = np.argsort(order)
    renumbered = np.where(retrieve < 0, -1, new_row[retrieve])
    before = accept_greedy(input_ids, predicted, retrieve)
    after = accept_greedy(input_ids[order], predicted[order], renumbered)
    assert after.published_tokens.tolist() == before.published_tokens.tolist()
    assert after.next_root == before.next_root
    assert after.winning_row == new_row[before.winning_row]
    count = before.published_count
    assert after.path_rows.tolist() == [*new_row[before.path_rows[:count]], *before.path_rows[count:]]


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=4, max_size=4), st.lists(st.integers(0, 4), max_size=3))
def test_published_tokens_and_next_root_continue_sequential_greedy_decoding(
    table: list[int], prompt: list[int]
) -> None:
    def greedy_next(tokens: list[int]) -> int:
        return (table[len(tokens) % 4] + sum(tokens)) % 5

    root = greedy_next(prompt)
    ranks = [[first, second, third] for first in range(2) for second in range(2) for third in range(2)]
    tree = parse_tree(sorted(prefix_closure(ranks)), "a test")
    buffers = compile_tree(tree, topk=2, depth=3)
    slots = np.array([root, 1, 3, 0, 2, 4, 1])  # [1 + 3 heads * 2]
    input_ids = slots[buffers.tree_indices]
    predicted = np.array(
        [
            greedy_next([*prompt, *(int(token) for token in input_ids[np.flatnonzero(visible)])])
            for visible in buffers.tree_mask
        ]
    )
    acceptance = accept_greedy(input_ids, predicted, buffers.retrieve_indices)
    tokens = list(prompt)
    for token in (*acceptance.published_tokens.tolist(), acceptance.next_root):
        assert token == greedy_next(tokens)
        tokens.append(token)
