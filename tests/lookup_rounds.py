"""What lookup tests have in common: trees, a prompt, and an observer of what rounds look up."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.lookup import lookup_tokens
from medusa_engine.runtime.onnxruntime_state import OnnxRuntimeState
from medusa_engine.runtime.tree import parse_tree
from medusa_engine.runtime.tree_buffers import TreeBuffers

CHAIN = parse_tree([["L"] * length for length in (1, 2, 3)], "lookup alone")
BOTH = parse_tree([[0], [1], [0, 0], ["L"], ["L", "L"], ["L", "L", "L"]], "heads and lookup")
REPETITIVE = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8]


class Proposal(NamedTuple):
    """What a round verified: tokens by path, and the position of its root."""

    root_position: int
    root: int
    lookup: list[int]


class Observer:
    """Notes the lookup tokens of every round, of all sessions, that a test runs."""

    def __init__(self) -> None:
        self.proposals: list[Proposal] = []

    def __call__(self, state: OnnxRuntimeState, tree: TreeBuffers) -> None:
        limits = state._backend.limits
        tokens = state.proposed()[: len(tree.tree_indices)]
        looked_up = tree.tree_indices > limits.heads * limits.topk
        # Siblings among them there are none: they stand in the order of their depth.
        self.proposals.append(Proposal(int(state.slot.position_ids[0, 0]), int(tokens[0]), tokens[looked_up].tolist()))

    def check(self, tokens: list[int]) -> None:
        """Compare with what the reference looks up in the tokens of prompt and answer; forget them."""
        assert self.proposals
        for position, root, lookup in self.proposals:
            assert lookup == lookup_tokens([*tokens[:position], root], len(lookup)).tolist()
        self.proposals = []


def observed(monkeypatch: pytest.MonkeyPatch) -> Observer:
    """An observer of all rounds from now on."""
    watched = Observer()
    run = OnnxRuntimeState.round

    def round_(state: OnnxRuntimeState, tree: TreeBuffers, next_tree: TreeBuffers) -> None:
        watched(state, tree)
        run(state, tree, next_tree)

    monkeypatch.setattr(OnnxRuntimeState, "round", round_)
    return watched


def plain(engine: Engine, prompt: list[int], tokens: int, **options: Any) -> list[int]:
    return engine.generate(prompt_ids=prompt, max_new_tokens=tokens, speculation=False, **options).token_ids
