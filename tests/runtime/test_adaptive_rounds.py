"""Trees that change from round to round of an answer, whose tokens stay those of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, product
from typing import TYPE_CHECKING, Any

import pytest
from drafts import ObservedState
from greedy_check import check_greedy
from tiny_models import greedy_ids

from medusa_engine.runtime.adaptive_plans import AdaptiveTrees
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.generation import Generation
from medusa_engine.runtime.lookup import lookup_tokens
from medusa_engine.runtime.onnxruntime_state import OnnxRuntimeState
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.rounds import Decoding
from medusa_engine.runtime.session import Session
from medusa_engine.runtime.tree import Tree, parse_tree
from medusa_engine.runtime.tree_buffers import TreeBuffers
from medusa_engine.runtime.tree_plan import PLAIN, TreePlan

if TYPE_CHECKING:
    from tiny_models import Exported, Rigged

PAIR = parse_tree([[0]], "pair")
WIDE = parse_tree([[0], [1], [0, 0], [1, 0], [0, 1], [1, 1], [0, 0, 0]], "wide")
LOOKUP_TREE = parse_tree([[0], ["L"], ["L", "L"], ["L", "L", "L"]], "lookup")
TREES = (PLAIN, PAIR, WIDE)
PATTERNS = [list(pattern) for pattern in product(TREES, repeat=3)]  # each tree behind each other, and behind itself
PROMPT = [5, 1, 4, 9]


def in_words(pattern: Sequence[Tree]) -> str:
    return "-".join(tree.name for tree in pattern)


class PatternPlans:
    """`Plans` that go through a pattern of trees, whatever is measured; notes what it was told."""

    def __init__(self, engine: Engine, pattern: Sequence[Tree]) -> None:
        plans = {tree.name: TreePlan(tree, engine.limits) for tree in pattern}
        self._pattern = cycle([plans[tree.name] for tree in pattern])
        self.used = pattern[0]
        self.prompt: list[int] = []
        self.tokens: list[int] = []
        self.whole: list[tuple[str, int]] = []  # tree and tokens of the rounds that were measured

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.prompt, self.tokens = list(prompt_ids), []

    def choose(self) -> TreePlan:
        return next(self._pattern)

    def record(self, plan: TreePlan, token_ids: Sequence[int], seconds: float, *, whole: bool) -> None:
        assert seconds > 0
        self.tokens += token_ids
        if whole:
            self.whole.append((plan.tree.name, len(token_ids)))


def follow(monkeypatch: pytest.MonkeyPatch, engine: Engine, pattern: Sequence[Tree]) -> PatternPlans:
    """Let the answers of an engine go through a pattern."""
    plans = PatternPlans(engine, pattern)
    monkeypatch.setattr(engine, "plans", lambda *arguments, **options: plans)
    return plans


def names(pattern: Sequence[Tree], rounds: int) -> list[str]:
    return [tree.name for tree, _ in zip(cycle(pattern), range(rounds), strict=False)]


# Exactness


@pytest.mark.parametrize("pattern", PATTERNS, ids=in_words)
def test_answers_are_the_same_whatever_tree_follows_which(
    rigged_64: Exported, rigged_heads: Rigged, monkeypatch: pytest.MonkeyPatch, pattern: list[Tree]
) -> None:
    follow(monkeypatch, rigged_64.engine, pattern)
    answer = rigged_64.engine.generate(prompt_ids=[3, 0], max_new_tokens=40)
    assert answer.token_ids == rigged_heads.answer([3, 0], 40)
    assert answer.round_trees == names(pattern, answer.rounds)
    published, frontier = [], 0
    for tree in answer.round_trees:  # each round publishes what its own tree can
        used = {"plain": PLAIN, "pair": PAIR, "wide": WIDE}[tree]
        published.append(rigged_heads.published_per_round([frontier], used, 99)[0])
        frontier = rigged_heads.answer([frontier], published[-1])[-1]
    assert answer.published_per_round[:-1] == published[:-1]


@pytest.mark.parametrize("policy", [AcceptancePolicy(), AcceptancePolicy("sample", temperature=0.9, seed=3)], ids=str)
def test_random_heads_and_sampled_tokens_too(
    own_heads: Exported, monkeypatch: pytest.MonkeyPatch, policy: AcceptancePolicy
) -> None:
    engine = own_heads.engine
    plain = engine.generate(prompt_ids=PROMPT, max_new_tokens=30, acceptance=policy, speculation=False)
    if policy.name == "greedy":
        check_greedy(plain.token_ids, greedy_ids(own_heads.model, PROMPT, 30), PROMPT, own_heads.model)
    for pattern in PATTERNS:
        follow(monkeypatch, engine, pattern)
        answer = engine.generate(prompt_ids=PROMPT, max_new_tokens=30, acceptance=policy)
        assert answer.token_ids == plain.token_ids, pattern


@pytest.mark.parametrize("pattern", [[WIDE, PLAIN], [PLAIN, PLAIN, WIDE], [PAIR, WIDE, PLAIN]], ids=in_words)
def test_at_the_end_of_the_cache_every_tree_shrinks_and_shrunk_rounds_are_not_measured(
    rigged_32: Exported, rigged_heads: Rigged, pattern: list[Tree]
) -> None:
    engine, limits = rigged_32.engine, rigged_32.engine.limits
    shrunk = 0
    for prompt_tokens in range(20, 32):
        prompt = [3] * prompt_tokens
        plans = PatternPlans(engine, pattern)
        rows: list[int] = []

        def observe(state: OnnxRuntimeState, tree: TreeBuffers, rows: list[int] = rows) -> None:
            rows.append(len(tree.tree_indices))
            assert state.slot.past_length[0] + state.slot.pending_count[0] + rows[-1] <= limits.max_length

        state = ObservedState(engine.backend.new_state(), observe)
        decoding = Decoding(state, limits, prompt, plan=plans, max_new_tokens=99, stop_ids=frozenset())
        tokens = [token for round_ in decoding for token in round_.token_ids]
        assert tokens == rigged_heads.answer(prompt, limits.max_length - prompt_tokens)
        assert decoding.finish_reason == "cache_full"
        before_end = zip(cycle(pattern), rows[:-1], strict=False)  # what the last one published may have been cut
        whole = [tree.name for tree, count in before_end if count == tree.nodes]
        assert [name for name, _ in plans.whole] == whole
        assert (plans.prompt, plans.tokens) == (prompt, tokens)
        shrunk += len(rows) - 1 - len(whole)
    assert shrunk


@pytest.mark.parametrize("pattern", [[WIDE, PLAIN], [PLAIN, PAIR, WIDE]], ids=in_words)
def test_stops_and_budgets_fall_where_they_do_with_one_tree(
    rigged_32: Exported, rigged_heads: Rigged, monkeypatch: pytest.MonkeyPatch, pattern: list[Tree]
) -> None:
    engine = rigged_32.engine
    expected = rigged_heads.answer([0], 30)
    assert expected[9] in engine.stop_token_ids
    follow(monkeypatch, engine, pattern)
    for budget in range(13):
        answer = engine.generate(prompt_ids=[0], max_new_tokens=budget)
        assert answer.token_ids == expected[: min(budget, 10)]
        assert answer.finish_reason == ("length" if budget < 10 else "stop")


@pytest.mark.parametrize("pattern", [[WIDE, PLAIN], [PLAIN, PAIR, WIDE]], ids=in_words)
def test_turns_and_forks_of_a_session_are_those_of_new_ones(
    own_heads: Exported, monkeypatch: pytest.MonkeyPatch, pattern: list[Tree]
) -> None:
    engine = own_heads.engine

    def turn(session: Session, new: list[int]) -> tuple[list[int], Generation]:
        prompt = [*session.token_ids, *new]
        return prompt, session.generate(prompt_ids=prompt, max_new_tokens=7)

    with monkeypatch.context() as patch, engine.session() as session:
        follow(patch, engine, pattern)
        answers = [turn(session, [number, 8]) for number in range(3)]
        with session.fork() as fork:
            answers += [turn(fork, [7]), turn(session, [6]), turn(fork, [3, 4])]
    for prompt, answer in answers:
        assert answer.token_ids == engine.generate(prompt_ids=prompt, max_new_tokens=7, speculation=False).token_ids


# What the choice is told, and what is said of it


def test_every_round_is_told_and_all_but_the_last_are_measured(rigged_64: Exported) -> None:
    engine = rigged_64.engine
    plans = PatternPlans(engine, [WIDE, PLAIN, PAIR])
    state = engine.backend.new_state()
    decoding = Decoding(state, engine.limits, [0], plan=plans, max_new_tokens=30, stop_ids=frozenset())
    rounds = list(decoding)
    assert plans.prompt == [0]
    assert plans.tokens == [token for round_ in rounds for token in round_.token_ids]
    assert plans.whole == [(round_.tree, len(round_.token_ids)) for round_ in rounds[:-1]]  # it may have been cut


def test_a_round_is_counted_whole_where_a_stop_text_ends_in_it_or_the_budget_not_at_all(rigged_64: Exported) -> None:
    engine = rigged_64.engine
    plans = PatternPlans(engine, [WIDE])
    state = engine.backend.new_state()
    decoding = Decoding(state, engine.limits, [0], plan=plans, max_new_tokens=30, stop_ids=frozenset())
    for round_ in decoding:
        if len(round_.token_ids) > 2:
            decoding.stop(1)
    assert len(decoding.rounds[-1].token_ids) == 1
    assert plans.whole[-1][1] > 2


def test_pieces_and_the_record_name_the_tree_of_every_round(
    own_heads: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = own_heads.engine
    pattern = [PAIR, PLAIN, WIDE]
    follow(monkeypatch, engine, pattern)
    stream = engine.stream(prompt_ids=PROMPT, max_new_tokens=12)
    pieces = list(stream)
    answer = stream.generation
    assert [piece.tree for piece in pieces] == answer.round_trees == names(pattern, answer.rounds)
    assert [piece.seconds for piece in pieces] == answer.round_seconds
    assert list(answer.rounds_per_tree) == ["pair", "plain", "wide"]
    assert sum(answer.rounds_per_tree.values()) == answer.rounds
    assert answer.tree == "pair"
    document = answer.document()
    assert (document["rounds_per_tree"], document["tree"]) == (answer.rounds_per_tree, "pair")
    plain = engine.generate(prompt_ids=PROMPT, max_new_tokens=3, speculation=False)
    assert (plain.rounds_per_tree, plain.tree) == ({"plain": 3}, "plain")


# The choice of an engine


def trees_of(engine: Engine, **options: Any) -> set[str]:
    names: set[str] = set()
    for _ in range(4):
        names |= set(engine.generate(prompt_ids=PROMPT, max_new_tokens=40, **options).round_trees)
    return names


def test_an_engine_of_one_tree_changes_between_it_and_plain_steps(own_heads: Exported) -> None:
    engine = Engine.open(own_heads.bundle, threads=1)
    assert trees_of(engine) == {"a_tree", "plain"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"adaptive": False}, "a_tree"),
        ({"tree": WIDE}, "wide"),
        ({"tree": PLAIN}, "plain"),
        ({"acceptance": AcceptancePolicy("typical")}, "a_tree"),  # its tokens depend on the tree
        ({"speculation": False}, "plain"),
    ],
    ids=["off", "given tree", "given root", "typical", "plain decoding"],
)
def test_what_fixes_the_tree(own_heads: Exported, options: dict[str, Any], expected: str) -> None:
    assert trees_of(Engine.open(own_heads.bundle, threads=1), **options) == {expected}


def test_what_is_measured_is_shared_by_sessions_and_kept_apart_by_policy(own_heads: Exported) -> None:
    engine = Engine.open(own_heads.bundle, threads=1)
    sample = AcceptancePolicy("sample", temperature=0.9, seed=3)
    first = engine.generate(prompt_ids=PROMPT, max_new_tokens=40).round_trees
    assert first[:3] == ["a_tree"] * 3 and "plain" in first  # with nothing known
    assert engine.generate(prompt_ids=PROMPT, max_new_tokens=40, acceptance=sample).round_trees[:3] == ["a_tree"] * 3
    shared = engine._adaptive
    assert set(shared) == {"greedy", "sample"}
    assert all(choice.costs.timed(0) for choice in (trees.choice for trees in shared.values()))


def test_a_session_keeps_its_plans_from_answer_to_answer_and_others_have_their_own(own_heads: Exported) -> None:
    engine = Engine.open(own_heads.bundle, threads=1)
    greedy_at_0 = AcceptancePolicy("sample", temperature=0.0, seed=3)
    with engine.session() as session, engine.session() as other:
        for each in (session, other):
            each.generate(prompt_ids=PROMPT, max_new_tokens=8)
        plans = session._plans["greedy"]
        session.generate(prompt_ids=[*PROMPT, 3], max_new_tokens=8, acceptance=greedy_at_0)
        with session.fork() as fork:
            fork.generate(prompt_ids=PROMPT, max_new_tokens=8)
            assert session._plans == {"greedy": plans}
            assert len({id(each._plans["greedy"]) for each in (session, other, fork)}) == 3


def test_lookups_are_counted_with_any_tree_as_the_reference_looks_them_up(
    own_heads: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = own_heads.engine
    trees = AdaptiveTrees([PAIR, LOOKUP_TREE], engine.limits, late=True)
    for prompt in ([5, 6, 7, 8, 5, 6, 7, 8, 5], PROMPT, [3]):
        learned: list[tuple[int, int, int]] = []
        plans = trees.session()
        # Plain steps: each token is a round's root.
        monkeypatch.setattr(plans._choice, "choose", lambda _match, heads: 2)
        monkeypatch.setattr(
            plans._choice,
            "learn",
            lambda tree, match, published, hits: learned.append((tree, published, hits)),  # noqa: B023
        )
        state = engine.backend.new_state()
        decoding = Decoding(state, engine.limits, prompt, plan=plans, max_new_tokens=30, stop_ids=frozenset())
        tokens = [*prompt, *(token for round_ in decoding for token in round_.token_ids)]
        expected = []
        for root in range(len(prompt), len(tokens)):
            found = lookup_tokens(tokens[: root + 1], 3).tolist()
            right = [one == other for one, other in zip(found, tokens[root + 1 :], strict=False)]
            if False in right or len(right) == 3:
                expected.append((2, 1, [*right, False].index(False)))
            else:
                break  # the answer ends before that can be told
        assert learned == expected
        assert len(expected) > 20
