"""The trees of an engine that its rounds change between, by what they publish per second there."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from medusa_engine.runtime.manifest import Limits
from medusa_engine.runtime.rounds import PLAIN, TreePlan
from medusa_engine.runtime.tree import Tree
from medusa_engine.runtime.tree_choice import TreeChoice

_log = logging.getLogger(__name__)


class AdaptivePlans:
    """`Plans` of a bundle's trees and of plain steps, for all answers of an engine under one acceptance policy.

    A plain step is a round that verifies and proposes the root alone, without the heads (exported as an `If`). It does
    what the step graph does, which is therefore not loaded: a second session of ONNX Runtime would take another 1.2
    times the weights file.

    What is measured is shared: answers that run at the same time share the cores that they are measured on, too, and
    a new session begins with what earlier ones have found. Several threads may use it.

    Args:
        trees: the first is used first.
        limits: of the engine.

    Raises:
        UserError: the engine cannot run one of the trees.
    """

    def __init__(self, trees: Sequence[Tree], limits: Limits) -> None:
        plain = [] if any(tree.nodes == 1 for tree in trees) else [PLAIN]
        self.plans = [TreePlan(tree, limits) for tree in (*trees, *plain)]
        self.choice = TreeChoice([plan.tree.nodes for plan in self.plans])

    @property
    def used(self) -> Tree:
        """The tree in use: the fastest, as far as is known."""
        return self.plans[self.choice.used].tree

    def choose(self) -> TreePlan:
        return self.plans[self.choice.choose()]

    def record(self, plan: TreePlan, published: int, seconds: float, *, steady: bool) -> None:
        before = self.used
        self.choice.record(self.plans.index(plan), published, seconds, steady=steady)
        if self.used is not before:
            _log.debug("tree %s instead of %s", self.used.name, before.name)
