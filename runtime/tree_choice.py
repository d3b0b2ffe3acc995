"""Which tree the next round verifies: what it publishes in this session over what its rounds cost on this machine."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from medusa_engine.runtime.lookup_replay import Match
from medusa_engine.runtime.past_rounds import COPYING, KINDS, LookupHits, Mean, kind_of
from medusa_engine.runtime.round_costs import RoundCosts

EXPLORATION = 1 / 200  # of the rounds: what trying other trees may cost
MARGIN = 1.05  # a larger tree is taken where it is better by more
TRIAL_ROUNDS = 4  # in a row when a tree is tried
BEHIND = 1.5  # tokens that a session may fall behind its smallest tree alone, and one more while it copies
FORGIVEN = 1 / 50  # of each token that it publishes: what was lost counts so much less

_LEAST_LOSS = 0.1  # per round of a trial, in rounds: how often what looks as good is tried
_LEAST_ALLOWANCE = 2.0  # rounds that a trial may lose, whatever was expected
_SESSION_MEMORY, _ENGINE_MEMORY = 32.0, 512.0  # rounds
_PRIOR_ROUNDS = 24.0  # of a session that weigh as much as what the engine knows of lookups
_DOUBT = 2.0  # rounds besides whose lookup found nothing: what looks good may be luck
_LEAST_LEAD = -2.5  # tokens: what was lost beyond does not count, or a session would not try again for long
_SAME_ROUNDS = 8  # that the smallest tree verifies before it is compared anew: comparing costs time, too
_PRIOR_TOKENS = 4.0  # drafts of heads in a session that weigh as much as what the engine knows of them


class TreeShape(NamedTuple):
    """What the choice has to know of a tree.

    Attributes:
        rows: packed rows, root included; one is plain decoding.
        lookup: length of its lookup chain.
        heads: its nodes that hold candidates of heads.
    """

    rows: int
    lookup: int
    heads: int


class TreeChoice:
    """What all sessions of an engine know together: costs of rounds, and how often drafts are right at large.

    Several threads may use it and its sessions.

    Args:
        shapes: of the trees, at least one; the first is used while nothing is known.
    """

    def __init__(self, shapes: Sequence[TreeShape]) -> None:
        self.shapes = list(shapes)
        self.depth = max(shape.lookup for shape in shapes)
        self.smallest = min(range(len(shapes)), key=lambda tree: shapes[tree].rows)
        self.costs = RoundCosts([shape.rows for shape in shapes])
        self.lock = threading.Lock()
        self.lookups = LookupHits(self.depth, _ENGINE_MEMORY)
        self.lookups.expect_the_usual()
        # What heads publish beyond the lookup chain: where the lookup is wrong, and where it is right.
        self.beyond = [(Mean(_ENGINE_MEMORY), Mean(_ENGINE_MEMORY)) for _ in shapes]
        self.credit = [0.0] * len(self.shapes)  # rounds that a trial may cost: an engine's first answers pay for none

    def session(self) -> SessionChoice:
        """The choice of a new session, which begins with what is known."""
        return SessionChoice(self)

    def relative_cost(self, tree: int) -> float | None:
        """Rounds of the smallest tree that take as long as one of this; None where one of both is not known."""
        cost, least = self.costs.of(tree), self.costs.of(self.smallest)
        return None if cost is None or least is None else cost / least

    def heads_add(self, tree: int, *, hit: bool) -> float:
        """Tokens that the tree's heads add to what is looked up; of a tree that never ran, what the likest one's do."""
        shape = self.shapes[tree]
        mean = self.beyond[tree][hit]
        if not shape.heads or (hit and shape.lookup and not mean.weight):
            return 0.0
        known = [other for other, means in enumerate(self.beyond) if means[hit].weight]
        if not mean.weight and known:
            likest = min(known, key=lambda other: abs(self.shapes[other].heads - shape.heads))
            mean = self.beyond[likest][hit]
        return mean.total / mean.weight if mean.weight else 0.0


class SessionChoice:
    """Says which tree each round of a session verifies; made by `TreeChoice.session`.

    A tree is worth the tokens that its round is expected to publish over what it costs. How far lookups are right is
    known of every round, whatever tree it verified, and depends on the key that was found and on how many tokens in a
    row they have just found: where an answer copies, a long chain is worth its rows, elsewhere it is left out. What
    heads add is known of trees that ran; here it is measured how this session's text compares with others'. Both begin
    with what the engine knows.

    Other trees are tried for some rounds in a row: the smallest one as soon as nothing else tells what rows cost, those
    that are expected to be worse as often as it costs EXPLORATION of the rounds together. A trial ends early if it
    costs far more than expected. A session that has lost tokens against its smallest tree alone, which a plain step is,
    may lose a few more and no others: what most sessions gain is no comfort to the one that loses. The choice has no
    clock and draws nothing: the same calls get the same answers.
    """

    def __init__(self, shared: TreeChoice) -> None:
        self._shared = shared
        self._lookups = LookupHits(shared.depth, _SESSION_MEMORY)
        self._heads = Mean(_SESSION_MEMORY)  # tokens that heads added, over those that were expected
        self._lead = 0.0  # tokens that were published beyond those of the smallest tree in the same time
        self._best: list[int | None] = [None] * KINDS  # tree in use by kind of match; None before trees were compared
        self._compared = [0] * KINDS  # the round in which that was
        self._kind = self._round = self._credited = 0
        self._tried = self._beside = 0  # a tree that is tried, and the one that would be used
        self._left = 0  # rounds of the trial to come
        self._allowance = 0.0  # what it may still lose, in rounds of the tree beside it

    @property
    def used(self) -> int:
        """Index of the tree in use: the best for the last match, as far as is known."""
        return self._best[self._kind] or 0

    def wants_heads(self, match: Match) -> bool:
        """Whether the tree of a round with a match like this is expected to hold candidates of heads."""
        with self._shared.lock:
            kind = kind_of(match)
            if self._best[kind] is None:
                self._compare(kind)
            tree = self._tried if self._left else self._best[kind]
            return self._shared.shapes[tree or 0].heads > 0

    def choose(self, match: Match, *, heads: bool = True) -> int:
        """Index of the tree for a round.

        Args:
            match: of its lookup, or the last one that is known.
            heads: whether there are candidates of heads; else a tree without any is chosen.
        """
        with self._shared.lock:
            self._round += 1
            self._kind = kind = kind_of(match)
            same = self._best[kind] == self._shared.smallest and self._round - self._compared[kind] < _SAME_ROUNDS
            if not self._left and not same:
                self._compare(kind)
            if self._left and (heads or not self._shared.shapes[self._tried].heads):
                self._left -= 1
                return self._tried
            best = self.used
            if heads or not self._shared.shapes[best].heads:
                return best
            without = [tree for tree, shape in enumerate(self._shared.shapes) if not shape.heads]
            return self._best_of(without, self._worth(kind), kind)

    def record(self, tree: int, published: int, seconds: float) -> None:
        """Count the time of a round.

        Args:
            tree: index of the tree that it verified.
            published: tokens it published.
            seconds: its wall time.
        """
        with self._shared.lock:
            cost, usual = self._shared.costs.add(tree, seconds), self._shared.costs.of(self._beside)
            lead = self._lead + published - (self._shared.relative_cost(tree) or published)
            self._lead = lead if lead > 0 else max(min(lead + FORGIVEN * published, 0.0), _LEAST_LEAD)
            if self._left and tree == self._tried and cost is not None and usual is not None:
                self._allowance -= cost / usual - published / self._published(0)[self._beside]
                if self._allowance < 0:
                    self._left = 0

    def learn(self, tree: int, match: Match, published: int, hits: int) -> None:
        """Count what a round published, once the tokens behind it tell how far its lookup was right.

        Args:
            match: that its tree was chosen with.
            hits: right tokens of a lookup chain as deep as the deepest of the trees.
        """
        with self._shared.lock:
            shared, shape = self._shared, self._shared.shapes[tree]
            for lookups in (shared.lookups, self._lookups):
                lookups.add(kind_of(match), hits)
            if shape.heads:
                added = published - 1 - min(hits, shape.lookup)
                self._heads.add(added, shared.heads_add(tree, hit=hits > 0))
                shared.beyond[tree][hits > 0].add(added)

    def _published(self, kind: int) -> list[float]:
        """Tokens that a round of each tree is expected to publish."""
        shared = self._shared
        general, own = shared.lookups.counts[kind], self._lookups.counts[kind]
        part = _PRIOR_ROUNDS / sum(general)
        weights = [count + part * prior for count, prior in zip(own, general, strict=True)]
        weights[0] += _DOUBT
        reached = list(accumulate(reversed(weights)))[::-1]  # by depth: of rounds whose lookup is right so far
        right = reached[1] / reached[0] if shared.depth else 0.0
        like_here = (self._heads.total + _PRIOR_TOKENS) / (self._heads.weight + _PRIOR_TOKENS)
        return [
            1
            + sum(reached[1 : 1 + shape.lookup]) / reached[0]
            + like_here * (right * shared.heads_add(tree, hit=True) + (1 - right) * shared.heads_add(tree, hit=False))
            for tree, shape in enumerate(shared.shapes)
        ]

    def _worth(self, kind: int) -> list[float | None]:
        """Tokens per unit of cost of each tree; None of one whose cost is not known."""
        costs = map(self._shared.costs.of, range(len(self._shared.shapes)))
        published = self._published(kind)
        return [None if cost is None else tokens / cost for tokens, cost in zip(published, costs, strict=True)]

    def _compare(self, kind: int) -> None:
        """Find the best tree for a kind of match, and begin the trial that is due, if any."""
        worth, before = self._worth(kind), self._best[kind] or 0
        used = self._best_of(range(len(worth)), worth, kind)
        self._best[kind], self._compared[kind] = used, self._round
        if not self._shared.costs.timed(used) and worth[used] is not None:
            self._try(used, before, TRIAL_ROUNDS)  # long enough to be timed
        self._try_what_is_due(worth, kind, used)

    def _best_of(self, trees: Iterable[int], worth: Sequence[float | None], kind: int) -> int:
        """The best that the session affords, or the smallest of those that are as good but for MARGIN."""
        known = {tree: value for tree in trees if (value := worth[tree]) is not None and self._affords(tree, kind)}
        if not known:
            return min(trees)
        least = max(known.values()) / MARGIN
        return min((tree for tree, value in known.items() if value >= least), key=self._rows)

    def _try_what_is_due(self, worth: Sequence[float | None], kind: int, used: int) -> None:
        """Begin the trial that is due, if any; that of the fewest rows first."""
        shared = self._shared
        others = sorted((tree for tree in range(len(worth)) if tree != used), key=self._rows)
        for tree in others:
            shared.credit[tree] += EXPLORATION * (self._round - self._credited) / len(others)
        self._credited = self._round
        shared.credit[used] = 0.0
        if self._left or not shared.costs.timed(used):
            return
        for tree in others:
            loss = TRIAL_ROUNDS * self._loss(tree, worth, used)
            if shared.credit[tree] >= loss and self._affords(tree, kind):
                self._try(tree, used, loss)
                return

    def _loss(self, tree: int, worth: Sequence[float | None], used: int) -> float:
        """What a round of a trial is expected to lose, in rounds of the tree in use; 0 to learn what rows cost."""
        cost, usual = self._shared.costs.of(tree), self._shared.costs.of(used)
        value, best = worth[tree], worth[used]
        if cost is None or usual is None or value is None or best is None:
            return 0.0
        return max(cost / usual * (1 - value / best), _LEAST_LOSS)

    def _affords(self, tree: int, kind: int) -> bool:
        """Whether the session has lost no more than it may even if a round of this tree publishes one token."""
        cost = self._shared.relative_cost(tree)
        return cost is None or cost <= 1 or self._lead + 1 - cost >= -BEHIND - (kind == COPYING)

    def _try(self, tree: int, beside: int, expected_loss: float) -> None:
        self._tried, self._beside, self._left = tree, beside, TRIAL_ROUNDS
        self._allowance = max(2 * expected_loss, _LEAST_ALLOWANCE)
        self._shared.credit[tree] = 0.0

    def _rows(self, tree: int) -> int:
        return self._shared.shapes[tree].rows
