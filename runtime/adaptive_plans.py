"""The trees of an engine that its rounds change between, by what they publish over what they cost."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from medusa_engine.runtime.lookup_replay import LookupReplay
from medusa_engine.runtime.manifest import Limits
from medusa_engine.runtime.rounds import PLAIN, TreePlan
from medusa_engine.runtime.tree import Tree
from medusa_engine.runtime.tree_choice import SessionChoice, TreeChoice, TreeShape

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

    Raises:
        UserError: the engine cannot run one of the trees.
    """

    def __init__(self, trees: Sequence[Tree], limits: Limits) -> None:
        plain = [] if any(tree.nodes == 1 for tree in trees) else [PLAIN]
        self.plans = [TreePlan(tree, limits) for tree in (*trees, *plain)]
        self.choice = TreeChoice(
            [TreeShape(tree.nodes, tree.lookup, tree.nodes - 1 - tree.lookup) for tree in (*trees, *plain)]
        )

    def session(self) -> AdaptivePlans:
        """The plans of a new session."""
        return AdaptivePlans(self.plans, self.choice.session(), self.choice.depth)


class AdaptivePlans:
    """`Plans` of one session, for its answers one after the other; made by `AdaptiveTrees.session`."""

    def __init__(self, plans: Sequence[TreePlan], choice: SessionChoice, depth: int) -> None:
        self._plans = list(plans)
        self._choice = choice
        self._depth = depth
        self._begin([0])

    @property
    def used(self) -> Tree:
        """The tree in use: the best for this session, as far as is known."""
        return self._plans[self._choice.used].tree

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._begin(prompt_ids)

    def choose(self) -> TreePlan:
        before = self._choice.used
        self._streaks.append(self._replay.streak)
        plan = self._plans[self._choice.choose(self._replay.streak)]
        if self._choice.used != before:
            _log.debug("tree %s instead of %s", self.used.name, self._plans[before].tree.name)
        return plan

    def record(self, plan: TreePlan, token_ids: Sequence[int], seconds: float, *, whole: bool) -> None:
        tree, root = self._plans.index(plan), len(self._replay.tokens)
        streak = self._streaks.popleft()
        for token in token_ids:
            self._replay.append(token)
        if whole:
            self._choice.record(tree, len(token_ids), seconds)
            self._unknown.append(_Unknown(root, tree, streak, len(token_ids)))
        while self._unknown and (hits := self._replay.hits(self._unknown[0].root)) is not None:
            done = self._unknown.popleft()
            self._choice.learn(done.tree, done.streak, done.published, hits)

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        self._replay = LookupReplay(prompt_ids, self._depth)
        self._streaks = deque[int]()  # that the trees of the rounds to be recorded were chosen with
        self._unknown = deque[_Unknown]()


class _Unknown(NamedTuple):
    """A round of which the tokens behind it do not tell yet how far its lookup was right."""

    root: int
    tree: int
    streak: int
    published: int
