"""Which tree the next round verifies: chosen by measured published tokens per second, plain steps among them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from statistics import median

EXPLORATION = 1 / 32  # of the rounds: what trying the other trees may cost
MARGIN = 1.05  # a tree takes over when it is faster by more
PROBE_ROUNDS = 8  # in a row when a tree is tried
LEAST_TIMED = 3  # rounds of a probe before it is judged
LEAST_PUBLISHED = 16  # rounds of a tree before it takes over; a tree of one row always publishes one token
TIMES_KEPT = 11  # the median of the last ones is a tree's time per round
ROUNDS_REMEMBERED = 64  # of the tree in use: how fast old rounds stop to count
ROUNDS_CARRIED = 3  # what a tree's older rounds count at the beginning of a probe

_LEAST_LOSS = 0.25  # per round of a probe, in rounds: how often what looks as good is tried again


class TreeChoice:
    """Estimates tokens per second of several trees from their rounds and says which one to use.

    The first tree is used first, with nothing known of any. Then every other tree is tried now and then, a few rounds
    in a row, and takes over if it is faster by more than MARGIN. A tree's tokens per second are the mean of what its
    rounds published over the median of their times, both of recent rounds. A trial is expected to lose the time that
    its rounds took the last time beyond what the tree in use needs for as many tokens; of a tree that was never tried,
    a straight line through the times of the others says what its rows will cost. Trials are as frequent as they cost
    together at most EXPLORATION of the rounds, so that what is far slower is tried seldom, but never not at all. Each
    tree is owed a first trial that costs no more than PROBE_ROUNDS rounds.

    It has no clock and draws nothing: the same calls get the same answers. Several threads may use it, whose rounds
    count together.

    Args:
        rows: packed rows of each tree, at least one tree; one row is plain decoding.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self._trees = [_Measured(count) for count in rows]
        self._lock = threading.Lock()
        self._used = 0
        self._run = 0  # rounds that the tree in use was chosen for since it took over or the last probe
        self._probed: int | None = None
        self._left = 0  # rounds of the probe to come
        self._fresh = 0  # timed rounds of the probe
        self._allowance = 0.0  # what the probe may still lose, in rounds of the tree in use

    @property
    def used(self) -> int:
        """Index of the tree in use: the fastest, as far as is known."""
        return self._used

    def choose(self) -> int:
        """Index of the tree for the round behind the one that is about to run."""
        with self._lock:
            if not self._left:
                self._count_round()
                due = self._due()
                if due is None:
                    return self._used
                self._begin_probe(due)
            self._left -= 1
            if not self._left:
                self._end_probe()
            assert self._probed is not None
            return self._probed

    def record(self, tree: int, published: int, seconds: float, *, steady: bool = True) -> None:
        """Count a round.

        Args:
            tree: index of the tree that it verified.
            published: tokens it published.
            seconds: its wall time.
            steady: whether the rounds before and behind it are of the same tree; the time of others is used only
                where there is none better.
        """
        with self._lock:
            timed = steady and seconds > 0  # a coarse clock may say 0
            self._trees[tree].add(published, seconds, timed=timed)
            if tree == self._probed:
                self._fresh += timed
                self._judge_probe(tree, published, seconds)

    def tokens_per_second(self) -> list[float | None]:
        """The estimate for each tree; None before it was timed."""
        with self._lock:
            return [tree.speed for tree in self._trees]

    def _count_round(self) -> None:
        self._run += 1
        others = max(len(self._trees) - 1, 1)
        for index, tree in enumerate(self._trees):
            if index != self._used:
                tree.credit += EXPLORATION / others

    def _due(self) -> int | None:
        """The tree to try now, that of fewest rows first: what it takes tells what more rows will take."""
        used = self._trees[self._used]
        if self._run <= PROBE_ROUNDS or used.seconds is None or len(used.times) < LEAST_TIMED:
            return None  # there is nothing fresh to compare it with
        others = (index for index in range(len(self._trees)) if index != self._used)
        due = [index for index in others if self._trees[index].credit >= PROBE_ROUNDS * self._loss(index)]
        return min(due, key=lambda index: self._trees[index].rows, default=None)

    def _loss(self, index: int) -> float:
        """What a round of a probe is expected to lose, in rounds of the tree in use."""
        used, tree = self._trees[self._used], self._trees[index]
        assert used.seconds is not None
        seconds = tree.seconds or self._expected_seconds(tree.rows)
        published = tree.mean if tree.rounds or tree.rows == 1 else used.mean
        return max(seconds / used.seconds - published / used.mean, _LEAST_LOSS)

    def _expected_seconds(self, rows: int) -> float:
        """Time of a round of so many rows: on the line through the smallest and the largest tree that were timed."""
        timed = sorted((tree.rows, tree.seconds) for tree in self._trees if tree.seconds is not None)
        (least, short), (most, long) = timed[0], timed[-1]
        slope = max(long - short, 0.0) / max(most - least, 1)
        return max(short + slope * (rows - least), short)

    def _begin_probe(self, index: int) -> None:
        self._probed, self._left, self._fresh = index, PROBE_ROUNDS, 0
        self._allowance = 2 * max(self._trees[index].credit, PROBE_ROUNDS)
        self._trees[index].credit = 0.0
        self._trees[index].forget(ROUNDS_CARRIED)

    def _judge_probe(self, index: int, published: int, seconds: float) -> None:
        """Behind a round of the probe: go on, take the tree, or end the probe if it costs far more than expected."""
        tree, used = self._trees[index], self._trees[self._used]
        if tree.speed is None or used.speed is None or used.seconds is None:
            return
        self._allowance -= seconds / used.seconds - published / used.mean
        faster = tree.speed > MARGIN * used.speed
        if self._allowance < 0 and not faster:
            self._end_probe()
        if self._left or self._fresh < LEAST_TIMED or not faster:
            return
        if tree.rounds >= LEAST_PUBLISHED or tree.rows == 1:
            used.credit = 0.0
            self._used, self._probed = index, None
            self._end_probe()
        else:  # that may be luck: go on
            self._left = PROBE_ROUNDS

    def _end_probe(self) -> None:
        self._left = self._run = 0


class _Measured:
    """What is known of one tree.

    Attributes:
        rounds: that count for the mean, older ones less.
        credit: rounds of the tree in use that a probe may cost.
        times: of recent rounds, in seconds.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.rounds = 0.0
        self.times: deque[float] = deque(maxlen=TIMES_KEPT)
        self.credit = float(PROBE_ROUNDS)
        self._tokens = 0.0
        self._timed = False  # whether `times` are of steady rounds

    def add(self, published: int, seconds: float, *, timed: bool) -> None:
        self.forget(ROUNDS_REMEMBERED - 1)
        self.rounds += 1
        self._tokens += published
        if timed and not self._timed:
            self.times.clear()
        if seconds > 0 and (timed or not self._timed):
            self.times.append(seconds)
        self._timed |= timed

    def forget(self, rounds: float) -> None:
        """Let the rounds so far count as no more than this many."""
        if self.rounds > rounds:
            self._tokens *= rounds / self.rounds
            self.rounds = rounds

    @property
    def mean(self) -> float:
        """Tokens that a round publishes."""
        return self._tokens / self.rounds if self.rounds else 1.0

    @property
    def seconds(self) -> float | None:
        return median(self.times) if self.times else None

    @property
    def speed(self) -> float | None:
        seconds = self.seconds
        return self.mean / seconds if seconds and self.rounds else None
