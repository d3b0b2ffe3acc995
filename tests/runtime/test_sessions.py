"""Answers that share an engine, and passes of both graphs that share a state."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from cache_invariants import check_cache, prefill_cache
from drafts import PlantedDrafts
from greedy_check import check_greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import Exported, greedy_ids
from tree_strategies import trees

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.tree import Tree, parse_tree
from medusa_engine.runtime.tree_buffers import compile_tree

ANSWER_TOKENS = 20
SMALL = parse_tree([[0], [1], [0, 0]], "four rows")
CHAIN = parse_tree([[0], [0, 0], [0, 0, 0]], "chain")
ROOT = Tree(())

# Requests that differ in prompt length, tree, and speculation: what one leaves behind must not reach another
REQUESTS: list[dict[str, Any]] = [
    {"prompt_ids": [5, 1, 4], "tree": SMALL},
    {"prompt_ids": list(range(40)), "tree": CHAIN},
    {"prompt_ids": [9], "speculation": False},
    {"prompt_ids": [7, 7, 2, 30, 11], "tree": ROOT},
]


def solo(exported: Exported, request: dict[str, Any]) -> list[int]:
    return exported.engine.generate(**request, max_new_tokens=ANSWER_TOKENS).token_ids


@pytest.mark.parametrize("first", range(len(REQUESTS)))
def test_interleaved_answers_are_what_each_is_alone(own_heads: Exported, first: int) -> None:
    pair = [REQUESTS[first], REQUESTS[(first + 1) % len(REQUESTS)]]
    alone = [solo(own_heads, request) for request in pair]
    streams = [iter(own_heads.engine.stream(**request, max_new_tokens=ANSWER_TOKENS)) for request in pair]
    together: list[list[int]] = [[], []]
    unfinished = [0, 1]
    while unfinished:
        for index in list(unfinished):
            piece = next(streams[index], None)
            if piece is None:
                unfinished.remove(index)
            else:
                together[index] += piece.token_ids
    assert together == alone
    for request, token_ids in zip(pair, alone, strict=True):
        reference = greedy_ids(own_heads.model, request["prompt_ids"], ANSWER_TOKENS)
        check_greedy(token_ids, reference, request["prompt_ids"], own_heads.model)


def test_an_answer_left_in_the_middle_does_not_disturb_the_next(own_heads: Exported) -> None:
    alone = solo(own_heads, REQUESTS[0])
    stream = own_heads.engine.stream(**REQUESTS[1], max_new_tokens=ANSWER_TOKENS)
    next(stream)
    assert solo(own_heads, REQUESTS[0]) == alone


def test_answers_on_several_threads_are_what_each_is_alone(own_heads: Exported) -> None:
    requests = REQUESTS * 5
    alone = [solo(own_heads, request) for request in REQUESTS] * 5
    with ThreadPoolExecutor(max_workers=len(REQUESTS)) as pool:
        together = list(pool.map(lambda request: solo(own_heads, request), requests))
    assert together == alone


def test_the_tree_may_change_from_answer_to_answer_on_one_engine(rigged_64: Exported, rigged_heads: Any) -> None:
    for tree in (SMALL, ROOT, CHAIN, SMALL, CHAIN, None):
        generation = rigged_64.engine.generate(prompt_ids=[3], max_new_tokens=30, tree=tree, adaptive=False)
        assert generation.token_ids == rigged_heads.answer([3], 30)
        used = tree or rigged_64.engine.tree
        assert generation.published_per_round == rigged_heads.published_per_round([3], used, 30)


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_steps_and_rounds_of_changing_trees_continue_one_another_on_one_state(own_heads: Exported, data: Any) -> None:
    limits = own_heads.engine.limits
    tree_of = trees(depth=limits.heads, topk=limits.topk, max_nodes=limits.max_tree_nodes)
    prompt = data.draw(st.lists(st.integers(0, limits.vocab_size - 1), min_size=1, max_size=8))
    # A pass verifies the tree that the pass before it proposed; None is a step, which proposes the root alone.
    passes: list[Tree | None] = data.draw(st.lists(st.none() | tree_of, min_size=2, max_size=8))
    answer = greedy_ids(own_heads.model, prompt, len(passes) * (limits.depth + 1))
    seed = data.draw(st.integers(0, 2**32 - 1))
    drafts = PlantedDrafts(len(prompt), answer, limits.vocab_size, np.random.default_rng(seed))

    buffers = [None if tree is None else compile_tree(tree, topk=limits.topk, depth=limits.depth) for tree in passes]
    root = compile_tree(ROOT, topk=limits.topk, depth=limits.depth)
    state = own_heads.engine.backend.new_state()
    state.prefill(np.array(prompt), 0, buffers[0])
    published: list[int] = []
    for index, tree in enumerate(buffers):
        proposed_next = buffers[index + 1] if index + 1 < len(buffers) else None
        if tree is None:
            state.step()
        else:
            usable = tree if state.rows_ready >= len(tree.tree_indices) else root
            drafts(state, usable)
            state.round(usable, proposed_next or root)
        published += state.read().tokens.tolist()
        tokens = [*prompt, *published]
        check_cache(state, len(tokens), prefill_cache(own_heads.model, tokens))
    check_greedy(published, answer[: len(published)], prompt, own_heads.model)


@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_step_and_round_graph_write_the_same_cache_and_propose_the_same_token(any_bundle: Exported, data: Any) -> None:
    limits = any_bundle.engine.limits
    prompt = data.draw(st.lists(st.integers(0, limits.vocab_size - 1), min_size=1, max_size=30))
    root = compile_tree(ROOT, topk=limits.topk, depth=limits.depth)
    by_step, by_round = (any_bundle.engine.backend.new_state() for _ in range(2))
    by_step.prefill(np.array(prompt), 0, None)
    by_round.prefill(np.array(prompt), 0, root)
    for _ in range(3):
        for name, value in vars(by_step.slot).items():
            used = slice(None, 1) if name in ("input_ids", "position_ids") else slice(None)
            np.testing.assert_array_equal(value[..., used], getattr(by_round.slot, name)[..., used], err_msg=name)
        for name, buffer in by_step.cache.items():
            np.testing.assert_array_equal(buffer.numpy(), by_round.cache[name].numpy(), err_msg=name)
        by_step.step()
        by_round.round(root, root)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"acceptance": "sample"}, "acceptance is 'sample'"),
        ({"tree": [[0]]}, "tree is"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ({"max_new_tokens": float("nan")}, "max_new_tokens is nan"),
        ({"max_new_tokens": "5"}, "max_new_tokens is '5'"),
        ({"max_new_tokens": True}, "max_new_tokens is true"),
        ({"deadline": "1"}, "deadline is '1'"),
        ({"prompt_ids": [1.7, 2]}, "prompt token 1.7"),
        ({"prompt_ids": [True]}, "prompt token true"),
        ({"prompt_ids": [10**5000]}, "prompt token of 16610 bits"),
        ({"max_new_tokens": -(10**5000)}, "max_new_tokens is of 16610 bits"),
        ({"deadline": -(10**5000)}, "deadline is of 16610 bits"),
    ],
)
def test_arguments_of_another_kind_are_refused_by_name(own_heads: Exported, options: Any, named: str) -> None:
    with pytest.raises(UserError) as caught:
        own_heads.engine.generate(**{"prompt_ids": [1, 2, 3], "max_new_tokens": 2, **options})
    assert named in caught.value.problem.replace('"', "'")


def test_numbers_of_numpy_are_numbers(own_heads: Exported) -> None:
    engine = own_heads.engine
    answer = engine.generate(prompt_ids=np.array([5, 1, 4]), max_new_tokens=np.int64(4))
    assert answer.token_ids == engine.generate(prompt_ids=[5, 1, 4], max_new_tokens=4).token_ids


@pytest.mark.parametrize("value", ["1", None, True])
@pytest.mark.parametrize("name", ["temperature", "top_p", "repetition_penalty"])
def test_policy_parameters_of_another_kind_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        AcceptancePolicy("sample", **{name: value})
    assert name in caught.value.problem


def test_an_answer_is_not_closed_under_the_pass_of_another_thread(
    own_heads: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, goes_on = threading.Event(), threading.Event()
    with own_heads.engine.session() as session:
        stream = session.stream(prompt_ids=[5, 1, 4], max_new_tokens=8)
        round_ = session._state.round

        def wait(*arguments: Any) -> None:
            running.set()
            goes_on.wait(60)
            round_(*arguments)

        monkeypatch.setattr(session._state, "round", wait)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(lambda: stream.generation)
            assert running.wait(60)
            with pytest.raises(UserError, match="another thread"):
                session.close()
            goes_on.set()
            assert answer.result().token_ids == solo(own_heads, {"prompt_ids": [5, 1, 4]})[:8]
