"""The rounds of `make soak`, on a tiny model: what is right passes, and what is wrong is found."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import soak_rounds
from soak_rounds import MaybePlanted, RandomPlans, Tally, write_answers

from medusa_engine.runtime.onnxruntime_state import OnnxRuntimeState
from medusa_engine.runtime.tree_buffers import TreeBuffers

if TYPE_CHECKING:
    from tiny_models import Exported

PROMPTS = [[1, 2, 3], [40], [5, 6, 7, 8, 9]]
TOKENS = 80


def test_answers_with_random_trees_are_those_of_plain_decoding(own_heads: Exported) -> None:
    tally = Tally()
    finished = write_answers(own_heads.engine, PROMPTS, 0, tally, tokens=TOKENS)
    assert sorted(prompt for prompt, _, _ in finished) == sorted(PROMPTS)
    assert all(answer == expected and len(answer) == TOKENS for _, answer, expected in finished)
    assert (tally.prompts, tally.tokens, tally.near_ties) == (3, 3 * TOKENS, [])
    assert tally.caches == tally.rounds // soak_rounds.CACHE_EVERY > 0


def test_a_wrong_row_of_a_cache_is_found(own_heads: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = MaybePlanted.__call__

    def spoilt(self: MaybePlanted, state: OnnxRuntimeState, tree: TreeBuffers) -> None:
        planted(self, state, tree)
        state.cache["key.1"].numpy()[0, 0, 0] += 0.1

    monkeypatch.setattr(MaybePlanted, "__call__", spoilt)
    monkeypatch.setattr(soak_rounds, "CACHE_EVERY", 1)
    with pytest.raises(AssertionError, match=r"key\.1 differs"):
        write_answers(own_heads.engine, PROMPTS, 0, Tally(), tokens=TOKENS)


def test_a_wrong_token_is_told(own_heads: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bonus token that is not the model's: the answers differ, which the soak then holds against transformers."""
    read = OnnxRuntimeState.read

    def other(self: OnnxRuntimeState) -> object:
        published = read(self)
        return published._replace(tokens=(published.tokens + (published.past_length == 40)) % 61)

    expected = {tuple(prompt): soak_rounds.plain(own_heads.engine, prompt, TOKENS) for prompt in PROMPTS}
    monkeypatch.setattr(soak_rounds, "plain", lambda _engine, prompt, _count: expected[tuple(prompt)])
    monkeypatch.setattr(soak_rounds, "CACHE_EVERY", 1 << 30)
    monkeypatch.setattr(OnnxRuntimeState, "read", other)
    finished = write_answers(own_heads.engine, PROMPTS, 0, Tally(), tokens=TOKENS)
    assert any(answer != expected for _, answer, expected in finished)


def test_trees_are_of_every_size_with_heads_and_lookup(own_heads: Exported) -> None:
    limits = replace(own_heads.engine.limits, lookup=own_heads.engine.limits.heads + 4)
    plans = RandomPlans(limits, np.random.default_rng(0))
    trees = [plans.choose().tree for _ in range(300)]
    assert {tree.lookup for tree in trees} == set(range(limits.lookup + 1))
    assert {tree.heads for tree in trees} == set(range(limits.heads + 1))
    assert {1, 2, limits.max_tree_nodes // 2} <= {tree.nodes for tree in trees}
