"""The trees of an engine that its rounds change between, by what they publish over what they cost.

Where a pass is read before the next one is launched, its proposal holds the candidates of all trees, and the tree of
the next round is chosen when the tokens before it, and so the match of its lookup, are known: no row is spent on a
lookup that has found nothing. Elsewhere it is chosen one pass earlier.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from medusa_engine.runtime.lookup_replay import LookupReplay, Match
from medusa_engine.runtime.manifest import Limits
from medusa_engine.runtime.tree import LOOKUP, Tree, TreePath
from medusa_engine.runtime.tree_buffers import TreeBuffers, compile_tree
from medusa_engine.runtime.tree_choice import SessionChoice, TreeChoice, TreeShape
from medusa_engine.runtime.tree_plan import PLAIN, Proposal, TreePlan

_log = logging.getLogger(__name__)


class AdaptiveTrees:
    """A bundle's trees and plain steps, and what all answers of an engine under one acceptance policy know of them.

    A plain step is a round that verifies and proposes the root alone, without the heads (exported as an `If`). It does
    what the step graph does, which is therefore not loaded: a second session of ONNX Runtime would take another 1.2
    times the weights file.

    What rounds cost is shared: answers that run at the same time share the cores that they are measured on, too. What
    they publish is measured for each session, which begins with what earlier ones have found. Several threads may use
    it.

    Args:
        trees: the first is used while nothing is known.
        limits: of the engine.
        late: choose a tree when its round is launched; for states that launch no pass ahead of those that were read.

    Raises:
        UserError: the engine cannot run one of the trees.
    """

    def __init__(self, trees: Sequence[Tree], limits: Limits, *, late: bool) -> None:
        plain = [] if any(tree.nodes == 1 for tree in trees) else [PLAIN]
        self.plans = [TreePlan(tree, limits) for tree in (*trees, *plain)]
        self.choice = TreeChoice(
            [TreeShape(tree.nodes, tree.lookup, tree.nodes - 1 - tree.lookup) for tree in (*trees, *plain)]
        )
        self.late = late
        # What is proposed, by whether candidates of heads are.
        self.proposals = [_proposal(trees, limits, heads=heads) for heads in (False, True)]

    def session(self) -> AdaptivePlans:
        """The plans of a new session."""
        return AdaptivePlans(self, self.choice.session())


class AdaptivePlans:
    """`Plans` of one session, for its answers one after the other; made by `AdaptiveTrees.session`."""

    def __init__(self, trees: AdaptiveTrees, choice: SessionChoice) -> None:
        self._trees = trees
        self._plans = trees.plans
        self._choice = choice
        self._begin([0])

    @property
    def used(self) -> Tree:
        """The tree in use: the best for this session, as far as is known."""
        return self._plans[self._choice.used].tree

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._begin(prompt_ids)

    def choose(self) -> Proposal:
        if not self._trees.late:
            return self._chosen(self._replay.match, heads=True)
        heads = self._choice.wants_heads(self._matches[-1] if self._matches else self._replay.match)
        return _Candidates(self._trees.proposals[heads], self, heads=heads)

    def record(self, plan: TreePlan, token_ids: Sequence[int], seconds: float, *, whole: bool) -> None:
        tree, root = self._plans.index(plan), len(self._replay.tokens)
        match = self._matches.popleft()
        for token in token_ids:
            self._replay.append(token)
        if whole:
            self._choice.record(tree, len(token_ids), seconds)
            self._unknown.append(_Unknown(root, tree, match, len(token_ids)))
        while self._unknown and (hits := self._replay.hits(self._unknown[0].root)) is not None:
            done = self._unknown.popleft()
            self._choice.learn(done.tree, done.match, done.published, hits)

    def _chosen(self, match: Match, *, heads: bool) -> TreePlan:
        before = self._choice.used
        self._matches.append(match)
        plan = self._plans[self._choice.choose(match, heads=heads)]
        if self._choice.used != before:
            _log.debug("tree %s instead of %s", self.used.name, self._plans[before].tree.name)
        return plan

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        self._replay = LookupReplay(prompt_ids, self._trees.choice.depth)
        self._matches = deque[Match]()  # that the trees of the rounds to be recorded were chosen with
        self._unknown = deque[_Unknown]()


class _Candidates:
    """`Proposal` of the candidates of all trees, or of those without heads."""

    def __init__(self, full: TreeBuffers, plans: AdaptivePlans, *, heads: bool) -> None:
        self.full = full
        self._plans = plans
        self._heads = heads

    def narrowed(self, root: int | None) -> TreePlan:
        assert root is not None
        return self._plans._chosen(self._plans._replay.match_behind(root), heads=self._heads)


def _proposal(trees: Iterable[Tree], limits: Limits, *, heads: bool) -> TreeBuffers:
    """Buffers that propose each candidate of the trees once, whatever lies before it on its paths."""
    paths = set[TreePath]()
    for path in (path for tree in trees for path in tree.paths):
        if path[-1] == LOOKUP:
            paths.add(path)
        elif heads:
            # A tree must hold the nodes before it, too.
            paths |= {(0,) * depth for depth in range(1, len(path))} | {(0,) * (len(path) - 1) + path[-1:]}
    union = Tree(tuple(sorted(paths, key=lambda path: (len(path), path))), "candidates")
    return compile_tree(union, topk=limits.topk, depth=limits.depth, heads=limits.heads)


class _Unknown(NamedTuple):
    """A round of which the tokens behind it do not tell yet how far its lookup was right."""

    root: int
    tree: int
    match: Match
    published: int
