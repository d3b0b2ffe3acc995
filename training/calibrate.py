"""Run an exported engine on prompts: what it publishes, and at which rank each head lists that."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np
import numpy.typing as npt

from medusa_engine.runtime.backend import DecodeState, Published
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError, WrongValueError
from medusa_engine.runtime.manifest import Limits
from medusa_engine.runtime.rounds import Decoding
from medusa_engine.runtime.tree import Tree, TreePath
from medusa_engine.runtime.tree_buffers import TreeBuffers
from medusa_engine.runtime.tree_plan import TreePlan
from medusa_engine.training.calibration import Answer, Calibration, usable_heads
from medusa_engine.training.tree_search import END, MISS, tree_of


def calibrate(
    engine: Engine,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    provenance: dict[str, Any],
    progress: Callable[[int, int], None],
) -> Calibration:
    """Answer every prompt greedily, one token per pass, and compare what every head lists with what came.

    What lookup would have found is told by the answers themselves, whether the engine has heads or lookup or both.

    Args:
        prompts: token ids, at least one prompt.
        max_new_tokens: of each answer that are looked at.
        provenance: kept in the calibration.
        progress: called with the number of answers done and of their tokens.

    Raises:
        UserError: the engine runs no tree of two nodes, or a prompt is empty or too long.
    """
    if max_new_tokens < 1:
        raise WrongValueError("max_new_tokens", str(max_new_tokens), "give 1 or more")
    if engine.limits.max_tree_nodes < 2:
        raise UserError("the engine runs no tree but the root", "export with medusa-export --max-tree-nodes 2 or more")
    most = engine.limits.max_length - 1
    for prompt in prompts:
        if len(prompt) > most:
            raise UserError(
                f"a prompt has {counted(len(prompt), 'token')}, but only {most} leave room for an answer", "shorten it"
            )
    engine.backend.load(speculation=True)
    answers: list[Answer] = []
    for index, prompt in enumerate(prompts):
        answers.append(_answer(engine, prompt, max_new_tokens))
        progress(index + 1, sum(len(answer.ranks) for answer in answers))
    limits = engine.limits
    return Calibration(provenance, limits.topk, limits.max_tree_nodes, answers, limits.lookup)


class _Recorder:
    """A `DecodeState` that keeps what was proposed for each round; proposals[t]: [N], its root is token t."""

    def __init__(self, state: DecodeState) -> None:
        self._state = state
        self.proposals: list[npt.NDArray[np.int64]] = []

    @property
    def ahead(self) -> int:
        return 0  # what a round verifies is looked at before it is launched

    def limit(self, stop_ids: Set[int], token_budget: int) -> None:
        self._state.limit(stop_ids, token_budget)

    @property
    def rows_ready(self) -> int:
        return self._state.rows_ready

    def prefill(self, token_ids: npt.NDArray[np.int64], start: int, next_tree: TreeBuffers | None) -> None:
        self._state.prefill(token_ids, start, next_tree)

    def round(self, tree: TreeBuffers, next_tree: TreeBuffers) -> None:
        self.proposals.append(self._state.proposed())
        self._state.round(tree, next_tree)

    def step(self) -> None:
        self._state.step()

    def read(self) -> Published:
        return self._state.read()

    def proposed(self) -> npt.NDArray[np.int64]:
        return self._state.proposed()

    def keep_proposed(self, rows: npt.NDArray[np.int64]) -> None:
        self._state.keep_proposed(rows)

    def keep_pending(self, count: int) -> None:
        self._state.keep_pending(count)


def _answer(engine: Engine, prompt: list[int], max_new_tokens: int) -> Answer:
    """A greedy answer of T <= max_new_tokens tokens, and rank vectors [T, K].

    It is written K tokens longer, so that its last heads have labels, too.
    """
    limits = engine.limits
    heads = usable_heads(limits)
    tokens: list[int] = []
    listed = np.zeros((0, 0), dtype=np.int64)  # [t, slot]: what the heads listed behind token t
    for tree in candidate_trees(limits):
        recorder = _Recorder(engine.backend.new_state())
        plan = TreePlan(tree, limits, verified_rows=1)
        decoding = Decoding(
            recorder,
            limits,
            prompt,
            plan=plan,
            max_new_tokens=max_new_tokens + heads,
            stop_ids=engine.stop_token_ids,
        )
        tokens = [token for round_ in decoding for token in round_.token_ids]  # the same for every tree
        if not listed.size:
            listed = np.full((len(tokens), 1 + limits.heads * limits.topk), MISS, dtype=np.int64)
        listed[:, plan.full.tree_indices] = recorder.proposals
    ranks = np.full((min(len(tokens), max_new_tokens), heads), END, dtype=np.int64)
    for position in range(len(ranks)):
        for head, token in enumerate(tokens[position + 1 : position + 1 + heads]):
            slot = 1 + head * limits.topk
            hits = np.flatnonzero(listed[position, slot : slot + limits.topk] == token)
            ranks[position, head] = hits[0] if len(hits) else MISS
    return Answer(list(prompt), ranks, tokens)


def candidate_trees(limits: Limits) -> list[Tree]:
    """Trees that the engine can run and that together have every candidate slot of its usable heads; mostly one.

    Without heads it is the root alone.
    """
    slots: list[TreePath] = [
        (0,) * head + (rank,) for head in range(usable_heads(limits)) for rank in range(limits.topk)
    ]
    trees = [] if slots else [tree_of((), "candidates")]
    while slots:
        chosen: set[TreePath] = set()
        while slots:
            wanted = chosen | {slots[0][:length] for length in range(1, len(slots[0]) + 1)}
            if len(wanted) >= limits.max_tree_nodes:
                break
            chosen = wanted
            slots.pop(0)
        trees.append(tree_of(chosen, "candidates"))
    return trees
