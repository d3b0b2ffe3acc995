"""Drafts of the test's own choice in place of the heads', so that a round accepts exactly what the test wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from medusa_engine.runtime.onnxruntime_backend import OnnxRuntimeState
from medusa_engine.runtime.tree_buffers import TreeBuffers

Ints = npt.NDArray[np.int64]


class ObservedState:
    """A `DecodeState` that calls a function before every round; everything else goes to the state it wraps."""

    def __init__(self, state: OnnxRuntimeState, before_round: Callable[[OnnxRuntimeState, TreeBuffers], None]) -> None:
        self.state = state
        self._before_round = before_round

    def __getattr__(self, name: str) -> Any:
        return getattr(self.state, name)

    def round(self, tree: TreeBuffers, next_tree: TreeBuffers) -> None:
        self._before_round(self.state, tree)
        self.state.round(tree, next_tree)


class PlantedDrafts:
    """Writes drafts into a state before each of its rounds.

    A random path of the tree gets the right tokens down to a random depth. Every other row whose parent is right
    gets a wrong token; below a wrong row the right token of that depth is as good as any, and frequent.

    Args:
        prompt_tokens: length of the prompt.
        answer: the right tokens.
        vocab_size: tokens to take wrong ones from.
        generator: of all choices.
        prefer_long: the deepest of three random choices, which makes answers shorter to run.

    Attributes:
        published: G of every round so far, as planned.
    """

    def __init__(
        self,
        prompt_tokens: int,
        answer: Sequence[int],
        vocab_size: int,
        generator: np.random.Generator,
        *,
        prefer_long: bool = False,
    ) -> None:
        self._prompt_tokens = prompt_tokens
        self._answer = answer
        self._vocab_size = vocab_size
        self._generator = generator
        self._draws = 3 if prefer_long else 1
        self.published: list[int] = []

    def __call__(self, state: OnnxRuntimeState, tree: TreeBuffers) -> None:
        rows = len(tree.tree_indices)
        begin = int(state.slot.position_ids[0, 0]) - self._prompt_tokens
        right = self._answer[begin:]  # by depth
        paths = self._generator.choice(tree.retrieve_indices, self._draws)
        path = max(paths, key=lambda path: (path >= 0).sum())
        longest = min(int((path >= 0).sum()), len(right)) - 1
        accepted = int(self._generator.integers(0, longest + 1, self._draws).max())
        planned = set(path[: accepted + 1].tolist())
        tokens = state.slot.input_ids[0]
        assert tokens[0] == right[0], "the root is not the target's own token"
        parents = parent_rows(tree)
        for row in range(1, rows):
            depth = int(tree.position_offsets[row])
            if depth < len(right) and (
                row in planned or (parents[row] not in planned and self._generator.random() < 0.5)
            ):
                tokens[row] = right[depth]
            else:
                tokens[row] = self._wrong(right[depth] if depth < len(right) else 0)
        self.published.append(accepted + 1)

    def _wrong(self, right: int) -> int:
        """A token that is not `right`, often 0."""
        offset = self._generator.integers(1, self._vocab_size)
        if right and self._generator.random() < 0.2:
            return 0
        return int((right + offset) % self._vocab_size)


def parent_rows(tree: TreeBuffers) -> list[int]:
    """Parent of each packed row; -1 for the root."""
    parents = [-1] * len(tree.tree_indices)
    for path in tree.retrieve_indices.tolist():
        for parent, child in pairwise(path):
            if child >= 0:
                parents[child] = parent
    return parents
