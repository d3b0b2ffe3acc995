"""Greedy answers equal transformers' own, for any tree and whatever the drafts are; the cache equals a prefill's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cache_invariants import check_cache, prefill_cache
from drafts import ObservedState, PlantedDrafts
from greedy_check import check_greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import RIGGED_HEADS, RIGGED_RANKS, RIGGED_VOCAB, Exported, Rigged, greedy_ids
from tree_invariants import prefix_closure
from tree_strategies import trees

from medusa_engine.runtime import rounds
from medusa_engine.runtime.rounds import Decoding
from medusa_engine.runtime.tree import Tree, parse_tree
from medusa_engine.runtime.tree_plan import TreePlan

ANSWER_TOKENS = 24


@st.composite
def prompts(draw: st.DrawFn, vocab_size: int) -> list[int]:
    return draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=12))


def decode(
    exported: Exported,
    prompt_ids: Sequence[int],
    tree: Tree | None,
    count: int,
    *,
    drafts: PlantedDrafts | None = None,
    stop_ids: frozenset[int] = frozenset(),
) -> Decoding:
    """Run an answer and compare the cache with a fresh prefill by transformers after every pass."""
    engine = exported.engine
    state = engine.backend.new_state()
    decoding = Decoding(
        state if drafts is None else ObservedState(state, drafts),
        engine.limits,
        prompt_ids,
        plan=None if tree is None else TreePlan(tree, engine.limits),
        max_new_tokens=count,
        stop_ids=stop_ids,
    )
    tokens = list(prompt_ids)
    for round_ in decoding:
        tokens += round_.token_ids
        check_cache(state, len(tokens), prefill_cache(exported.model, tokens))
    return decoding


def answer_of(decoding: Decoding) -> list[int]:
    return [token for round_ in decoding.rounds for token in round_.token_ids]


def published(decoding: Decoding) -> list[int]:
    return [len(round_.token_ids) for round_ in decoding.rounds]


def full_tree(ranks: int, depth: int) -> Tree:
    """Every path of `depth` ranks below `ranks`."""
    paths = prefix_closure(np.indices((ranks,) * depth).reshape(depth, -1).T.tolist())
    return parse_tree([list(path) for path in paths], f"{ranks}^{depth}")


@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_greedy_answers_equal_transformers_for_random_trees_and_prompts(any_bundle: Exported, data: Any) -> None:
    limits = any_bundle.engine.limits
    tree = data.draw(trees(depth=limits.heads, topk=limits.topk, max_nodes=limits.max_tree_nodes))
    prompt = data.draw(prompts(limits.vocab_size))
    reference = greedy_ids(any_bundle.model, prompt, ANSWER_TOKENS)
    decoding = decode(any_bundle, prompt, tree, ANSWER_TOKENS)
    check_greedy(answer_of(decoding), reference, prompt, any_bundle.model)
    assert decoding.finish_reason == "length"


@settings(deadline=None, max_examples=6)
@given(data=st.data())
def test_plain_greedy_answers_equal_transformers(any_bundle: Exported, data: Any) -> None:
    prompt = data.draw(prompts(any_bundle.engine.limits.vocab_size))
    reference = greedy_ids(any_bundle.model, prompt, ANSWER_TOKENS)
    decoding = decode(any_bundle, prompt, None, ANSWER_TOKENS)
    check_greedy(answer_of(decoding), reference, prompt, any_bundle.model)
    assert published(decoding) == [1] * ANSWER_TOKENS


@pytest.mark.parametrize("bundle", ["own_heads", "shared_heads", "zero_heads"])
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_whatever_a_round_accepts_the_answer_and_the_cache_stay_those_of_transformers(
    request: pytest.FixtureRequest, bundle: str, data: Any
) -> None:
    exported: Exported = request.getfixturevalue(bundle)
    limits = exported.engine.limits
    tree = data.draw(trees(depth=limits.heads, topk=limits.topk, max_nodes=limits.max_tree_nodes))
    prompt = data.draw(prompts(limits.vocab_size))
    reference = greedy_ids(exported.model, prompt, ANSWER_TOKENS + limits.depth)
    seed = data.draw(st.integers(0, 2**32 - 1))
    drafts = PlantedDrafts(len(prompt), reference, limits.vocab_size, np.random.default_rng(seed))
    decoding = decode(exported, prompt, tree, ANSWER_TOKENS, drafts=drafts)
    check_greedy(answer_of(decoding), reference[:ANSWER_TOKENS], prompt, exported.model)
    assert published(decoding)[:-1] == drafts.published[:-1]
    assert published(decoding)[-1] <= drafts.published[-1]  # cut at the budget


@pytest.mark.parametrize("bundle", ["own_heads", "shared_heads", "zero_heads"])
def test_planted_drafts_make_rounds_of_every_accepted_length(request: pytest.FixtureRequest, bundle: str) -> None:
    exported: Exported = request.getfixturevalue(bundle)
    limits = exported.engine.limits
    tree = full_tree(2, limits.heads).shrunk(limits.max_tree_nodes)
    prompt = [7, 3, 1]
    reference = greedy_ids(exported.model, prompt, 60 + limits.depth)
    drafts = PlantedDrafts(len(prompt), reference, limits.vocab_size, np.random.default_rng(0))
    decoding = decode(exported, prompt, tree, 60, drafts=drafts)
    assert answer_of(decoding) == reference[:60]
    assert published(decoding)[:-1] == drafts.published[:-1]
    assert set(published(decoding)) == set(range(1, limits.depth + 2))


# Heads that are right on purpose


def test_rigged_heads_are_accepted_at_every_length_from_none_to_the_full_depth(
    rigged_64: Exported, rigged_heads: Rigged
) -> None:
    tree = full_tree(RIGGED_RANKS, RIGGED_HEADS)
    lengths: Counter[int] = Counter()
    for token in range(0, RIGGED_VOCAB, 6):
        decoding = decode(rigged_64, [token], tree, 40)
        assert answer_of(decoding) == greedy_ids(rigged_64.model, [token], 40)
        assert published(decoding) == rigged_heads.published_per_round([token], tree, 40)
        lengths.update(count - 1 for count in published(decoding)[:-1])
    assert set(lengths) == set(range(RIGGED_HEADS + 1)), f"accepted suffix lengths {sorted(lengths.items())}"


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_a_random_tree_accepts_what_the_rigged_heads_and_its_paths_allow(
    rigged_64: Exported, rigged_heads: Rigged, data: Any
) -> None:
    tree = data.draw(trees(depth=RIGGED_HEADS, topk=RIGGED_RANKS + 1, max_nodes=64))
    prompt = data.draw(prompts(RIGGED_VOCAB))
    decoding = decode(rigged_64, prompt, tree, 30)
    assert answer_of(decoding) == rigged_heads.answer(prompt, 30)
    assert published(decoding) == rigged_heads.published_per_round(prompt, tree, 30)


# Prompts in chunks


@pytest.mark.parametrize("speculation", [True, False])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_a_prompt_around_a_multiple_of_the_chunk_is_prefilled_as_a_whole(
    own_heads: Exported, chunks: int, beyond: int, speculation: bool
) -> None:
    length = chunks * rounds.CHUNK_ROWS + beyond
    prompt = np.random.default_rng(length).integers(0, own_heads.engine.limits.vocab_size, length).tolist()
    decoding = decode(own_heads, prompt, full_tree(2, 2) if speculation else None, 6)
    check_greedy(answer_of(decoding), greedy_ids(own_heads.model, prompt, 6), prompt, own_heads.model)


@pytest.mark.parametrize("speculation", [True, False])
def test_prompts_of_every_length_around_small_chunks_are_prefilled_as_a_whole(
    own_heads: Exported, speculation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "CHUNK_ROWS", 4)
    for length in range(1, 14):
        prompt = np.random.default_rng(length).integers(0, own_heads.engine.limits.vocab_size, length).tolist()
        decoding = decode(own_heads, prompt, full_tree(2, 2) if speculation else None, 5)
        check_greedy(answer_of(decoding), greedy_ids(own_heads.model, prompt, 5), prompt, own_heads.model)
