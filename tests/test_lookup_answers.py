"""Trees with lookup nodes: what a round looks up is what the context says, and answers stay those of plain decoding."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_invariants import check_cache, prefill_cache
from greedy_check import check_greedy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lookup_rounds import BOTH, CHAIN, REPETITIVE, Observer, plain
from tiny_models import RIGGED_HEADS, RIGGED_VOCAB, Exported, Rigged, greedy_ids
from tree_strategies import trees

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.generation import GenerationStream
from medusa_engine.runtime.rounds import Decoding
from medusa_engine.runtime.tree import LOOKUP, Tree, parse_tree
from medusa_engine.runtime.tree_plan import PLAIN, TreePlan


@st.composite
def repetitive(draw: st.DrawFn, vocab_size: int) -> list[int]:
    """A prompt in which things recur."""
    parts = draw(st.lists(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=5), min_size=1, max_size=3))
    return [
        token
        for index in draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
        for token in parts[index % len(parts)]
    ]


@pytest.mark.parametrize("bundle", ["own_heads", "no_heads"])
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_answers_are_those_of_transformers_and_lookups_those_of_the_reference(
    request: pytest.FixtureRequest, bundle: str, observer: Observer, data: Any
) -> None:
    exported: Exported = request.getfixturevalue(bundle)
    limits = exported.engine.limits
    tree = data.draw(trees(depth=limits.heads, topk=limits.topk, max_nodes=limits.max_tree_nodes, lookup=limits.lookup))
    prompt = data.draw(repetitive(limits.vocab_size))
    state = exported.engine.backend.new_state()
    decoding = Decoding(state, limits, prompt, plan=TreePlan(tree, limits), max_new_tokens=30, stop_ids=frozenset())
    answer = [token for round_ in decoding for token in round_.token_ids]
    check_greedy(answer, greedy_ids(exported.model, prompt, 30), prompt, exported.model)
    check_cache(state, len(prompt) + 30, prefill_cache(exported.model, [*prompt, *answer]))
    observer.check([*prompt, *answer])


@pytest.mark.parametrize("bundle", ["own_heads", "no_heads"])
def test_what_recurs_is_found(request: pytest.FixtureRequest, bundle: str) -> None:
    engine = request.getfixturevalue(bundle).engine
    published: list[int] = []
    for token in range(0, engine.limits.vocab_size, 8):
        answer = engine.generate(prompt_ids=[token], max_new_tokens=60, tree=CHAIN)
        assert answer.token_ids == plain(engine, [token], 60)
        published += answer.published_per_round
    assert {1, 2, 3, 4} <= set(published)  # greedy answers of small models run in circles


def test_in_a_text_that_goes_round_every_round_publishes_the_whole_chain(
    rigged_64: Exported, rigged_heads: Rigged
) -> None:
    # The second time round its cycle every token is looked up right, wherever the heads are.
    engine = rigged_64.engine
    circle = rigged_heads.answer([0], RIGGED_VOCAB)
    prompt = [0, *circle[:-1], *circle[-1:], *circle[:2]]
    count = 64 - len(prompt)
    answer = engine.generate(
        prompt_ids=prompt, max_new_tokens=count, tree=parse_tree([["L"] * n for n in range(1, 5)], "L4")
    )
    assert answer.token_ids == rigged_heads.answer(prompt, count)
    assert answer.published_per_round == [5, 5, count - 10]
    assert engine.limits.lookup == RIGGED_HEADS


def test_turns_forks_and_ends_of_any_kind_leave_the_lookups_right(own_heads: Exported, observer: Observer) -> None:
    engine = own_heads.engine
    generator = np.random.default_rng(3)
    with engine.session() as session:
        prompt = REPETITIVE
        for turn in range(10):
            budget = int(generator.integers(1, 14))
            options: dict[str, Any] = [{"tree": BOTH}, {"tree": CHAIN}, {"speculation": False}][turn % 3]
            stream = session.stream(prompt_ids=prompt, max_new_tokens=budget, **options)
            if turn % 4 == 2:  # left in the middle
                next(stream, None)
                stream.close()
            tokens = [*prompt, *stream.generation.token_ids]
            assert stream.generation.token_ids == plain(engine, prompt, budget)[: len(tokens) - len(prompt)]
            if "tree" in options:
                observer.check(tokens)
            with session.fork() as fork:
                other = [*tokens[: len(tokens) - int(generator.integers(0, 3))], 5, 6, 7]
                answer = fork.generate(prompt_ids=other, max_new_tokens=12, tree=BOTH).token_ids
                assert answer == plain(engine, other, 12)
                observer.check([*other, *answer])
            kept = int(generator.integers(len(REPETITIVE), len(tokens) + 1))
            prompt = [*tokens[:kept], *generator.integers(0, 12, 2).tolist()]


def test_sessions_in_turn_look_up_their_own_tokens(own_heads: Exported) -> None:
    engine = own_heads.engine
    prompts = [REPETITIVE, [9, 3, 9, 3, 9], [2], [40, 41, 42, 40, 41]]
    streams = [
        engine.stream(prompt_ids=prompt, max_new_tokens=24, tree=(BOTH, CHAIN)[number % 2])
        for number, prompt in enumerate(prompts)
    ]
    answers: list[list[int]] = [[] for _ in prompts]
    while sum([_next_into(*each) for each in zip(streams, answers, strict=True)]):
        pass
    assert answers == [plain(engine, prompt, 24) for prompt in prompts]


def _next_into(stream: GenerationStream, answer: list[int]) -> bool:
    piece = next(stream, None)
    answer += piece.token_ids if piece else []
    return piece is not None


@pytest.mark.parametrize("trees", [[PLAIN, BOTH], [CHAIN, PLAIN, PLAIN, BOTH, CHAIN]], ids=["two", "five"])
def test_lookups_are_right_whatever_tree_came_before(
    own_heads: Exported, observer: Observer, trees: list[Tree]
) -> None:
    engine = own_heads.engine
    plans = [TreePlan(tree, engine.limits) for tree in trees]
    turns = cycle(plans)

    class Turns(TreePlan):
        def choose(self) -> TreePlan:
            return next(turns)

    for prompt in (REPETITIVE, [7, 7], [5, 1, 4, 9]):
        state = engine.backend.new_state()
        decoding = Decoding(
            state, engine.limits, prompt, plan=Turns(BOTH, engine.limits), max_new_tokens=30, stop_ids=frozenset()
        )
        answer = [token for round_ in decoding for token in round_.token_ids]
        assert answer == plain(engine, prompt, 30)
        observer.check([*prompt, *answer])


def test_texts_that_end_an_answer_end_it_where_they_do_without_lookup(chat_bundle: Path) -> None:
    engine = Engine.open(chat_bundle, threads=1)
    whole = engine.generate("abc abc abc", max_new_tokens=40, ignore_eos=True, speculation=False)
    tree = parse_tree([[0], ["L"], ["L", "L"]], "both")
    for start in range(0, len(whole.text or "") - 3, 4):
        stop = (whole.text or "")[start : start + 3]
        options: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "stop": stop}
        answer = engine.generate("abc abc abc", **options, tree=tree)
        expected = engine.generate("abc abc abc", **options, speculation=False)
        assert (answer.text, answer.token_ids, answer.finish_reason) == (expected.text, expected.token_ids, "stop")


@pytest.mark.parametrize("budget", range(1, 8))
def test_budgets_fall_inside_a_copied_chain(rigged_64: Exported, rigged_heads: Rigged, budget: int) -> None:
    circle = rigged_heads.answer([0], RIGGED_VOCAB)
    prompt = [0, *circle, *circle[:2]]
    answer = rigged_64.engine.generate(prompt_ids=prompt, max_new_tokens=budget, tree=CHAIN)
    assert answer.token_ids == rigged_heads.answer(prompt, budget)
    assert answer.published_per_round == [4] * (budget // 4) + [budget % 4] * (budget % 4 > 0)
    assert answer.finish_reason == "length"


def test_stop_tokens_and_the_end_of_the_cache_are_where_plain_decoding_has_them(rigged_32: Exported) -> None:
    engine = rigged_32.engine
    prompt = [3, 1, 4, 3, 1, 4, 3, 1]
    for start in range(12):
        for ignore_eos in (False, True):
            options: dict[str, Any] = {"prompt_ids": [*prompt, start], "max_new_tokens": 60, "ignore_eos": ignore_eos}
            answer = engine.generate(**options, tree=BOTH)
            expected = engine.generate(**options, speculation=False)
            assert (answer.token_ids, answer.finish_reason) == (expected.token_ids, expected.finish_reason)


def test_lookups_in_prompts_of_several_chunks(own_heads: Exported, observer: Observer) -> None:
    prompt = np.random.default_rng(0).integers(0, 20, 530).tolist()
    answer = own_heads.engine.generate(prompt_ids=prompt, max_new_tokens=20, tree=BOTH).token_ids
    assert answer == plain(own_heads.engine, prompt, 20)
    observer.check([*prompt, *answer])


# What is refused


def test_trees_beyond_what_the_engine_looks_up_are_refused(own_heads: Exported, no_heads: Exported) -> None:
    deep = Tree(tuple((LOOKUP,) * length for length in range(1, 6)), "deep")
    with pytest.raises(UserError, match="has 5 lookup nodes, but the engine offers 3") as error:
        own_heads.engine.generate(prompt_ids=[1], tree=deep)
    assert "--lookup-depth 5" in error.value.hint
    with pytest.raises(UserError, match="the engine has 0 heads"):
        no_heads.engine.generate(prompt_ids=[1], tree=parse_tree([[0]], "head"))
    assert (no_heads.engine.limits.heads, no_heads.engine.limits.lookup, no_heads.engine.tree.lookup) == (0, 4, 3)


def test_a_bundle_keeps_its_lookup_trees_as_files_have_them(no_heads: Exported) -> None:
    document = json.loads((no_heads.bundle / "tree.json").read_text())
    assert document["paths"] == [["L"], ["L", "L"], ["L", "L", "L"]]
