"""Which tree each round verifies: what the round loop asks, and the answer that is always the same tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from medusa_engine.runtime.manifest import Limits
from medusa_engine.runtime.tree import PLAIN_NAME, Tree, check_tree
from medusa_engine.runtime.tree_buffers import TreeBuffers, compile_tree

PLAIN = Tree((), PLAIN_NAME)  # the root alone: one token per pass


class Plans(Protocol):
    """Says which tree the next round verifies."""

    @property
    def used(self) -> Tree:
        """The tree that is taken where nothing else is tried."""

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """A new answer begins, to all these tokens."""

    def choose(self) -> Proposal:
        """What the pass that is about to run proposes for the round behind it."""

    def record(self, plan: TreePlan, token_ids: Sequence[int], seconds: float, *, whole: bool) -> None:
        """Take note of a round; they come in their order.

        Args:
            plan: of the tree.
            token_ids: tokens it published.
            seconds: its wall time.
            whole: whether it verified the whole tree and did not end the answer: else it may have been cut.
        """


class Proposal(Protocol):
    """What a pass proposes, of which the next round verifies a tree."""

    @property
    def full(self) -> TreeBuffers:
        """What is proposed."""

    def narrowed(self, root: int | None) -> TreePlan:
        """The tree that is verified: this, or one whose candidates are all proposed; asked once, before its round.

        Args:
            root: token of its root, which comes next in the answer; None where passes are launched ahead of those that
                were read, and all of what is proposed is verified.
        """


class TreePlan:
    """The buffers of one tree and of the smaller ones it shrinks to at the end of the cache.

    As `Plans` it chooses itself, always, and as `Proposal` it is verified as it is. Several threads may use it.

    Args:
        tree: proposed by every round.
        limits: of the engine.
        verified_rows: a round verifies no more than this many of its rows; None for all.

    Raises:
        UserError: the engine cannot run the tree.
    """

    def __init__(self, tree: Tree, limits: Limits, *, verified_rows: int | None = None) -> None:
        check_tree(
            tree,
            heads=limits.heads,
            topk=limits.topk,
            max_tree_nodes=limits.max_tree_nodes,
            lookup=limits.lookup,
        )
        self.tree = tree
        self._limits = limits
        self._most = min(tree.nodes, verified_rows or tree.nodes)
        self._by_rows: dict[int, TreeBuffers] = {}
        self.full = self._compiled(tree)

    def fit(self, rows: int) -> TreeBuffers:
        """Buffers of the tree's first `rows` packed rows, or of all that a round verifies if they are no more."""
        rows = min(rows, self._most)
        if rows not in self._by_rows:
            self._by_rows[rows] = self._compiled(self.tree.shrunk(rows))
        return self._by_rows[rows]

    def _compiled(self, tree: Tree) -> TreeBuffers:
        return compile_tree(tree, topk=self._limits.topk, depth=self._limits.depth, heads=self._limits.heads)

    @property
    def used(self) -> Tree:
        return self.tree

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Nothing depends on it."""

    def choose(self) -> TreePlan:
        return self

    def narrowed(self, root: int | None) -> TreePlan:
        return self

    def record(self, plan: TreePlan, token_ids: Sequence[int], seconds: float, *, whole: bool) -> None:
        """Nothing depends on it."""
