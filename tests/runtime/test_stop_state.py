"""Every policy's rounds and steps end an answer by themselves, and passes launched behind its end change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cache_invariants import Arrays, check_cache, prefill_cache
from drafts import ObservedState, PlantedDrafts
from tiny_models import Exported

from medusa_engine.runtime import rounds
from medusa_engine.runtime.backend import DecodeState
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.rounds import Decoding
from medusa_engine.runtime.tree import parse_tree
from medusa_engine.runtime.tree_plan import TreePlan

PROMPT = [7, 3, 1, 40]
TOKENS = 18  # of an answer that are looked at
TREE = parse_tree([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]], "a test's")
POLICIES = {
    "greedy": AcceptancePolicy(),
    "sample": AcceptancePolicy("sample", seed=5),
    "typical": AcceptancePolicy("typical", posterior_threshold=0.002),  # accepts most of what random heads draft
}


class Answerer:
    """Answers of one policy, in rounds or in steps, beside the answer that nothing ends.

    Attributes:
        whole: its tokens.
        published: how many of them each round published.
    """

    def __init__(self, exported: Exported, policy: str, speculation: bool) -> None:
        self.exported = exported
        self.limits = exported.engine.limits
        self.policy = POLICIES[policy]
        self.plan = TreePlan(TREE, self.limits) if speculation else None
        self.right: list[int] | None = None  # drafts are planted where the answer is known without them
        if policy != "typical":
            count = TOKENS + 2 * self.limits.depth
            options: dict[str, Any] = {"acceptance": self.policy, "speculation": False, "ignore_eos": True}
            self.right = exported.engine.generate(prompt_ids=PROMPT, max_new_tokens=count, **options).token_ids
        whole = self.answer(TOKENS + self.limits.depth, frozenset())
        self.whole = tokens_of(whole)
        self.published = [len(round_.token_ids) for round_ in whole.rounds]
        self.cache = prefill_cache(exported.model, [*PROMPT, *self.whole])

    def answer(self, max_new_tokens: int, stop_ids: frozenset[int], prompt: list[int] | None = None) -> Decoding:
        """A new answer; `self.state` is what it left."""
        self.state = self.exported.engine.backend.new_state()
        self.state.use(self.policy)
        observed: DecodeState = self.state
        if self.right is not None:
            drafts = PlantedDrafts(len(PROMPT), self.right, self.limits.vocab_size, np.random.default_rng(0))
            observed = ObservedState(self.state, drafts)  # type: ignore[assignment]
        return self._run(observed, prompt or PROMPT, max_new_tokens, stop_ids)

    def go_on(self, prompt: list[int], cached_tokens: int) -> Decoding:
        """Another answer in the cache of the last one."""
        self.state.wind_back(cached_tokens)
        return self._run(self.state, prompt, 8, frozenset(), cached_tokens)

    def _run(
        self, state: DecodeState, prompt: list[int], most: int, stop_ids: frozenset[int], cached_tokens: int = 0
    ) -> Decoding:
        decoding = Decoding(
            state,
            self.limits,
            prompt,
            plan=self.plan,
            max_new_tokens=most,
            stop_ids=stop_ids,
            cached_tokens=cached_tokens,
        )
        for _ in decoding:
            pass
        return decoding

    def launch(self) -> None:
        if self.plan is None:
            self.state.step()
        else:
            self.state.round(self.plan.fit(self.state.rows_ready), self.plan.full)

    def check_end(self, decoding: Decoding, tokens: int, reason: str) -> tuple[int, int]:
        """Check an answer that ended behind `tokens` tokens, and passes launched behind its end.

        Returns:
            The length of the last round without the end, and how many of its tokens were left.
        """
        assert tokens_of(decoding) == self.whole[:tokens]
        assert decoding.finish_reason == reason
        rest, expected = tokens, []
        while rest:
            expected.append(min(self.published[len(expected)], rest))
            rest -= expected[-1]
        assert [len(round_.token_ids) for round_ in decoding.rounds] == expected
        check_ended(self.state, len(PROMPT) + tokens, self.cache)
        before = self.state.read()
        for _ in range(3):
            self.launch()
            after = self.state.read()
            assert (after.tokens.size, after.token_budget, after.finished) == (0, before.token_budget, True)
            check_ended(self.state, len(PROMPT) + tokens, self.cache)
        return self.published[len(expected) - 1], expected[-1]


def check_ended(state: Any, tokens: int, cache: Arrays) -> None:
    assert state.slot.finished[0]
    check_cache(state, tokens, cache)


def tokens_of(decoding: Decoding) -> list[int]:
    return [token for round_ in decoding.rounds for token in round_.token_ids]


@pytest.fixture(
    scope="module",
    params=[("greedy", True), ("sample", True), ("typical", True), ("greedy", False), ("sample", False)],
    ids=lambda p: f"{p[0]} {'rounds' if p[1] else 'plain'}",
)
def answerer(request: pytest.FixtureRequest, own_heads: Exported) -> Answerer:
    return Answerer(own_heads, *request.param)


def test_the_rounds_are_long_enough_to_end_inside(answerer: Answerer) -> None:
    assert max(answerer.published) == (1 if answerer.plan is None else answerer.limits.depth + 1)


def test_a_budget_ends_an_answer_at_each_of_its_tokens(answerer: Answerer) -> None:
    places = {answerer.check_end(answerer.answer(n, frozenset()), n, "length") for n in range(1, TOKENS + 1)}
    if answerer.plan is not None:
        assert any(kept < length for length, kept in places)
        assert any(kept == length for length, kept in places)


def test_a_stop_token_ends_an_answer_where_it_comes_first(answerer: Answerer) -> None:
    unused = set(range(answerer.limits.vocab_size)) - set(answerer.whole)
    places = set()
    for index, token in enumerate(answerer.whole[:TOKENS]):
        first = answerer.whole.index(token)
        later = answerer.whole[index + 1 :]
        several = frozenset([token, *sorted(unused)[:2], *(t for t in later if answerer.whole.index(t) > first)])
        for stop_ids in (frozenset([token]), several):
            for budget in (first + 1, TOKENS + 1):  # a stop token wins over the budget
                places.add(answerer.check_end(answerer.answer(budget, stop_ids), first + 1, "stop"))
            if first:
                answerer.check_end(answerer.answer(first, stop_ids), first, "length")
    if answerer.plan is not None:
        assert any(1 == kept < length for length, kept in places), "no root was a stop token"
        assert any(1 < kept < length for length, kept in places), "no stop token was inside of a round"


def test_an_answer_behind_passes_launched_ahead_is_that_of_a_new_cache(answerer: Answerer) -> None:
    token = answerer.whole[5]
    stopped = tokens_of(answerer.answer(TOKENS, frozenset([token])))
    answerer.launch()
    answerer.launch()
    prompt = [*PROMPT, *stopped, 11, 12]
    again = answerer.go_on(prompt, len(prompt) - 2)
    answerer.state = answerer.exported.engine.backend.new_state()
    answerer.state.use(answerer.policy)
    assert tokens_of(again) == tokens_of(answerer.go_on(prompt, 0))
    assert again.finish_reason == "length"


def test_stop_tokens_in_the_prompt_end_nothing_and_are_not_counted(
    answerer: Answerer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "CHUNK_ROWS", 2)  # of four tokens two end a chunk
    stop_ids = frozenset(PROMPT) - {*answerer.whole[:4]}
    assert stop_ids
    for budget in (1, 2, 4):
        answerer.check_end(answerer.answer(budget, stop_ids), budget, "length")


def test_a_budget_may_be_larger_than_any_integer_of_the_graph(rigged_32: Exported) -> None:
    answer = rigged_32.engine.generate(prompt_ids=[0], max_new_tokens=10**30, ignore_eos=True)
    assert (answer.generated_tokens, answer.finish_reason) == (31, "cache_full")
