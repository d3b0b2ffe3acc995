"""What ends an answer: stop tokens, budgets and the end of the cache, also in the middle of a round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_invariants import cache_rows, check_cache, prefill_cache
from drafts import ObservedState
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import RIGGED_HEADS, RIGGED_RANKS, RIGGED_VOCAB, Exported, Rigged, greedy_ids
from tree_strategies import trees

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.onnxruntime_state import OnnxRuntimeState
from medusa_engine.runtime.rounds import Decoding
from medusa_engine.runtime.tree import Tree, load_tree, parse_tree
from medusa_engine.runtime.tree_buffers import TreeBuffers
from medusa_engine.runtime.tree_plan import TreePlan

DATA = Path(__file__).parents[1] / "data"
SHIPPED = Path(__file__).parents[2] / "trees"
LIMIT_CASES: list[dict[str, Any]] = json.loads((DATA / "limits" / "cases.json").read_text())
BUNDLES = {32: "rigged_32", 64: "rigged_64"}
# Every path of four ranks 0 or 1: with it the rigged heads publish up to five tokens in a round.
BINARY = parse_tree(
    [[int(rank) for rank in f"{bits:0{depth}b}"] for depth in range(1, RIGGED_HEADS + 1) for bits in range(2**depth)],
    "binary",
)


class Answer:
    """An answer that has been run to its end, with the rows of every round."""

    def __init__(
        self,
        exported: Exported,
        prompt_ids: list[int],
        tree: Tree | None = BINARY,
        *,
        max_new_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        limits = exported.engine.limits
        self.rows: list[int] = []  # packed rows of every round
        self.last_row: list[int] = []  # last cache row that counts after every round's append
        self.state = exported.engine.backend.new_state()
        self.decoding = Decoding(
            ObservedState(self.state, self._observe),
            limits,
            prompt_ids,
            plan=None if tree is None else TreePlan(tree, limits),
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
        )
        self.token_ids: list[int] = []
        for round_ in self.decoding:
            self.token_ids += round_.token_ids
            tokens = [*prompt_ids, *self.token_ids]
            check_cache(self.state, len(tokens), prefill_cache(exported.model, tokens))
        self.published = [len(round_.token_ids) for round_ in self.decoding.rounds]
        self.finish_reason = self.decoding.finish_reason

    def _observe(self, state: OnnxRuntimeState, tree: TreeBuffers) -> None:
        self.rows.append(len(tree.tree_indices))
        self.last_row.append(int(state.slot.past_length[0] + state.slot.pending_count[0]) + self.rows[-1] - 1)


def test_the_rigged_answers_have_rounds_of_every_length(rigged_64: Exported) -> None:
    # The tests below end answers in the middle of rounds: there must be long ones.
    answer = Answer(rigged_64, [0], max_new_tokens=48)
    assert set(answer.published) == set(range(1, RIGGED_HEADS + 2))


def place(published: list[int], index: int) -> tuple[int, int]:
    """The round of a token of an answer: how many tokens it published, and how many of them up to this one."""
    for length in published:
        if index < length:
            return length, index + 1
        index -= length
    raise AssertionError("the answer is shorter")


# Stop tokens


@pytest.mark.parametrize("tree", [None, BINARY], ids=["plain", "rounds"])
def test_a_stop_token_ends_the_answer_wherever_it_stands_in_a_round(
    rigged_64: Exported, rigged_heads: Rigged, tree: Tree | None
) -> None:
    expected = rigged_heads.answer([0], 40)
    whole = Answer(rigged_64, [0], tree, max_new_tokens=45).published
    places = set()
    for index, stop in enumerate(expected):
        answer = Answer(rigged_64, [0], tree, max_new_tokens=40, stop_ids=frozenset([stop]))
        assert answer.token_ids == expected[: index + 1]
        assert answer.finish_reason == "stop"
        assert int(answer.state.slot.pending_count[0]) == answer.published[-1]
        assert len(cache_rows(answer.state)) == 1 + len(answer.token_ids)
        places.add(place(whole, index))
        assert answer.published[-1] == place(whole, index)[1]
    if tree is BINARY:  # each of the tokens of rounds of each length has been the stop token
        lengths = range(1, RIGGED_HEADS + 2)
        assert places == {(length, kept) for length in lengths for kept in range(1, length + 1)}


def test_the_first_of_several_stop_tokens_in_a_round_ends_the_answer(rigged_64: Exported, rigged_heads: Rigged) -> None:
    expected = rigged_heads.answer([0], 40)
    whole = Answer(rigged_64, [0], max_new_tokens=40)
    begin = sum(whole.published[: whole.published.index(5)])
    stop_ids = frozenset(expected[begin + 1 : begin + 4])
    answer = Answer(rigged_64, [0], max_new_tokens=40, stop_ids=stop_ids)
    assert answer.token_ids == expected[: begin + 2]
    assert answer.published[-1] == 2


def test_the_budget_ends_an_answer_before_a_stop_token_behind_it_in_the_same_round(
    rigged_64: Exported, rigged_heads: Rigged
) -> None:
    expected = rigged_heads.answer([0], 40)
    whole = Answer(rigged_64, [0], max_new_tokens=40)
    begin = sum(whole.published[: whole.published.index(5)])
    for kept, reason in ((2, "length"), (3, "stop"), (4, "stop")):
        answer = Answer(rigged_64, [0], max_new_tokens=begin + kept, stop_ids=frozenset([expected[begin + 2]]))
        assert (answer.token_ids, answer.finish_reason) == (expected[: begin + min(kept, 3)], reason)


@pytest.mark.parametrize("speculation", [True, False])
def test_an_engine_stops_at_each_stop_token_of_its_checkpoint_unless_told_to_ignore_them(
    rigged_32: Exported, rigged_heads: Rigged, speculation: bool
) -> None:
    engine = rigged_32.engine
    behind_0 = rigged_heads.answer([0], 30)
    assert engine.stop_token_ids == {behind_0[9], behind_0[29]}
    for start, count in ((0, 10), (behind_0[9], 20)):
        options: dict[str, Any] = {"prompt_ids": [start], "max_new_tokens": 25, "speculation": speculation}
        stopped = engine.generate(**options)
        assert stopped.token_ids == rigged_heads.answer([start], count)
        assert stopped.finish_reason == "stop"
        assert sum(stopped.published_per_round) == stopped.generated_tokens == count
        ignoring = engine.generate(**options, ignore_eos=True)
        assert ignoring.token_ids == rigged_heads.answer([start], 25)
        assert ignoring.finish_reason == "length"


# Budgets


@pytest.mark.parametrize("tree", [None, BINARY], ids=["plain", "rounds"])
def test_an_answer_has_exactly_as_many_tokens_as_its_budget(
    rigged_64: Exported, rigged_heads: Rigged, tree: Tree | None
) -> None:
    expected = rigged_heads.answer([3, 0], 30)
    whole = Answer(rigged_64, [3, 0], tree, max_new_tokens=35).published
    cut = set()
    for budget in range(31):
        answer = Answer(rigged_64, [3, 0], tree, max_new_tokens=budget)
        assert answer.token_ids == expected[:budget]
        assert answer.finish_reason == "length"
        assert sum(answer.published) == budget
        if budget:
            assert len(cache_rows(answer.state)) == 2 + budget
            assert answer.published[-1] == place(whole, budget - 1)[1]
            cut.add(place(whole, budget - 1))
    if tree is BINARY:
        assert any(kept < length for length, kept in cut), "no budget ended inside a round"


def test_a_budget_of_zero_runs_nothing(rigged_64: Exported) -> None:
    answer = Answer(rigged_64, [0], max_new_tokens=0)
    assert (answer.token_ids, answer.published, answer.rows) == ([], [], [])
    assert answer.decoding.prefill_seconds == 0
    assert not answer.state.cache["key.0"].numpy().any()


def test_a_negative_budget_is_refused(rigged_64: Exported) -> None:
    with pytest.raises(UserError, match="max_new_tokens is -1"):
        rigged_64.engine.generate(prompt_ids=[0], max_new_tokens=-1)


# The end of the cache


def tree_of_rows(rows: int) -> Tree:
    return {5: parse_tree([[0], [1], [0, 0], [0, 0, 0]], "five rows"), 64: load_tree(SHIPPED / "64.json")}[rows]


@pytest.mark.parametrize("case", LIMIT_CASES, ids=lambda c: f"{c['prompt_len']} of {c['cache_len']}")
def test_an_answer_ends_where_the_cache_ends(request: pytest.FixtureRequest, case: dict[str, Any]) -> None:
    exported: Exported = request.getfixturevalue(BUNDLES[case["cache_len"]])
    tree = tree_of_rows(case["tree_rows"])
    assert tree.nodes == case["tree_rows"]
    prompt = np.random.default_rng(case["prompt_len"]).integers(0, RIGGED_VOCAB, case["prompt_len"]).tolist()
    if "expect" in case:  # a refusal
        with pytest.raises(UserError, match="the prompt is empty"):
            exported.engine.generate(prompt_ids=prompt, max_new_tokens=case["max_new_tokens"], tree=tree)
        return
    answer = Answer(exported, prompt, tree, max_new_tokens=case["max_new_tokens"])
    plain = Answer(exported, prompt, None, max_new_tokens=case["max_new_tokens"])
    # Every published token has its row in the cache: the smaller of the two counts that the case allows.
    room = case["cache_len"] - case["prompt_len"]
    count = min(case["max_new_tokens"], room)
    assert count in case["expect_tokens"]
    assert answer.token_ids == plain.token_ids == greedy_ids(exported.model, prompt, count)
    reason = "length" if case["max_new_tokens"] <= room else "cache_full"
    assert answer.finish_reason == plain.finish_reason == reason


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_near_the_end_of_the_cache_a_tree_shrinks_to_the_rows_that_are_left(
    rigged_32: Exported, rigged_heads: Rigged, data: Any
) -> None:
    limits = rigged_32.engine.limits
    tree = data.draw(trees(depth=RIGGED_HEADS, topk=RIGGED_RANKS, max_nodes=31))
    prompt = data.draw(st.lists(st.integers(0, RIGGED_VOCAB - 1), min_size=18, max_size=32))
    room = limits.max_length - len(prompt)
    answer = Answer(rigged_32, prompt, tree, max_new_tokens=100)
    assert answer.token_ids == rigged_heads.answer(prompt, room)
    assert answer.finish_reason == "cache_full"
    assert all(last < limits.max_length for last in answer.last_row)
    left = [room - sum(answer.published[:index]) for index in range(len(answer.published))]
    assert answer.rows == [min(tree.nodes, rows) for rows in left]


def test_a_tree_shrinks_down_to_the_root_alone(rigged_32: Exported) -> None:
    answer = Answer(rigged_32, [0] * 20, BINARY, max_new_tokens=100)
    assert answer.rows[0] == 12
    assert answer.published[-1] == 1
    assert Answer(rigged_32, [0] * 31, BINARY, max_new_tokens=100).rows == [1]


@pytest.mark.parametrize("speculation", [True, False])
def test_a_prompt_as_long_as_the_cache_gives_an_empty_answer(rigged_32: Exported, speculation: bool) -> None:
    generation = rigged_32.engine.generate(prompt_ids=[1] * 32, max_new_tokens=5, speculation=speculation)
    assert (generation.token_ids, generation.finish_reason) == ([], "cache_full")


@pytest.mark.parametrize("speculation", [True, False])
def test_a_prompt_longer_than_the_cache_is_refused_with_both_lengths(rigged_32: Exported, speculation: bool) -> None:
    with pytest.raises(UserError, match="the prompt has 33 tokens, but the cache holds 32"):
        rigged_32.engine.generate(prompt_ids=[1] * 33, speculation=speculation)


@pytest.mark.parametrize("token", [-1, RIGGED_VOCAB])
def test_a_prompt_token_outside_the_vocabulary_is_refused(rigged_32: Exported, token: int) -> None:
    with pytest.raises(UserError, match=f"prompt token {token} is outside the vocabulary of {RIGGED_VOCAB} tokens"):
        rigged_32.engine.generate(prompt_ids=[0, token])
