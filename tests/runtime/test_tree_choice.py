"""The tree of the next round, chosen from measured rounds: with made-up machines, whose best tree is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest

from medusa_engine.runtime.tree_choice import EXPLORATION, PROBE_ROUNDS, TreeChoice


class Machine:
    """Runs rounds of trees as a `Decoding` does: each proposes the next round's tree, and is recorded behind it.

    Args:
        rows: of each tree.
        seconds: of a round of each tree, in the mean.
        published: by a round of each tree, in the mean; at most 5.
        noise: relative, of the times; one round in fifty takes eight times as long besides.
    """

    def __init__(
        self,
        rows: Sequence[int],
        seconds: Sequence[float],
        published: Sequence[float],
        *,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.choice = TreeChoice(rows)
        self.seconds = list(seconds)
        self.published = list(published)
        self._noise = noise
        self._generator = np.random.default_rng(seed)
        self._before = -1
        self._next = self.choice.choose()
        self.trees: list[int] = []

    def run(self, rounds: int) -> list[int]:
        """Trees of the next rounds."""
        for _ in range(rounds):
            tree, follows = self._next, self.choice.choose()
            seconds, published = self.seconds[tree], self.published[tree]
            if self._noise:
                published = 1 + self._generator.binomial(4, (published - 1) / 4)
                seconds *= self._generator.lognormal(0, self._noise)
                seconds *= 8 if self._generator.random() < 0.02 else 1
            self.choice.record(tree, published, seconds, steady=self._before == tree == follows)
            self.trees.append(tree)
            self._before, self._next = tree, follows
        return self.trees[-rounds:]

    def cost(self, trees: Sequence[int]) -> float:
        """Time of rounds beyond what the best tree needs for as many tokens, in rounds of that."""
        best = max(range(len(self.seconds)), key=lambda tree: self.published[tree] / self.seconds[tree])
        tokens = sum(self.published[tree] for tree in trees)
        return sum(self.seconds[tree] for tree in trees) / self.seconds[best] - tokens / self.published[best]


# Rows, seconds and tokens per round; the first tree is that of the bundle, one row is plain decoding
MACHINES = {
    "the demo on a CPU": ((7, 1), (1.30, 1.0), (1.54, 1.0)),
    "heads that guess badly": ((8, 1), (1.45, 1.0), (1.02, 1.0)),
    "a large tree on a CPU": ((64, 1), (4.7, 1.0), (1.84, 1.0)),
    "a large tree first": ((64, 8, 1), (4.7, 1.4, 1.0), (1.9, 1.7, 1.0)),
    "a large tree second": ((7, 64, 1), (1.3, 4.7, 1.0), (1.6, 1.9, 1.0)),
    "an accelerator": ((8, 64, 1), (1.02, 1.1, 1.0), (1.5, 1.9, 1.0)),
    "plain steps alone": ((1,), (1.0,), (1.0,)),
}


def best_of(machine: Machine) -> int:
    speeds = [tokens / seconds for tokens, seconds in zip(machine.published, machine.seconds, strict=True)]
    return int(np.argmax(speeds))


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_tree_of_most_tokens_per_second_is_found_and_kept(name: str, noise: float) -> None:
    for seed in range(2 if noise else 1):
        machine = Machine(*MACHINES[name], noise=noise, seed=seed)
        machine.run(400)
        share = Counter(machine.run(1000))[best_of(machine)] / 1000
        assert share > 0.8, (seed, share)
        assert machine.choice.used == best_of(machine)


def test_the_first_tree_is_used_first_and_plain_steps_are_known_after_some_twenty_rounds() -> None:
    machine = Machine(*MACHINES["heads that guess badly"])
    first = machine.run(PROBE_ROUNDS)
    assert set(first) == {0}
    machine.run(3 * PROBE_ROUNDS)
    assert machine.choice.used == 1
    assert machine.choice.tokens_per_second() == pytest.approx([1.02 / 1.45, 1.0])


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_it_comes_back_when_the_text_or_the_machine_changes(noise: float) -> None:
    machine = Machine((8, 1), (1.45, 1.0), (1.02, 1.0), noise=noise)
    machine.run(500)
    for better, values in ((0, (2.2, 1.0)), (1, (1.02, 1.0)), (0, (2.4, 1.0))):  # the heads guess well, badly, well
        machine.published[:] = values
        machine.run(400)
        assert machine.choice.used == better
    machine.seconds[:] = 6.0, 1.0  # something else takes the cores that the rows were computed on
    machine.run(400)
    assert machine.choice.used == 1


def test_old_rounds_of_a_tree_do_not_keep_it_from_coming_back() -> None:
    machine = Machine((8, 1), (1.45, 1.0), (2.2, 1.0))
    machine.run(500)
    machine.published[0] = 1.02
    machine.run(500)
    assert machine.choice.used == 1
    machine.published[0] = 2.2
    machine.run(150)
    assert machine.choice.used == 0


def test_that_everything_becomes_slower_changes_nothing() -> None:
    machine = Machine(*MACHINES["the demo on a CPU"])
    machine.run(500)
    machine.seconds[:] = (10 * seconds for seconds in machine.seconds)
    machine.run(500)
    assert machine.choice.used == 0


@pytest.mark.parametrize("slow", [4.7, 30.0, 1000.0])
def test_trying_costs_a_bounded_share_however_slow_a_tree_is(slow: float) -> None:
    machine = Machine((8, 64, 1), (1.4, slow, 1.0), (1.6, 1.9, 1.0))
    first = machine.run(4000)
    # Each is owed a trial; a tree that is slower than its rows let expect costs one or two rounds more than it should.
    assert machine.cost(first) < 2 * 2 * PROBE_ROUNDS + 2 * slow / 1.4 + EXPLORATION * 4000
    assert machine.cost(machine.run(4000)) < 1.5 * EXPLORATION * 4000


def test_how_soon_a_larger_tree_is_tried_depends_on_what_rows_cost_here() -> None:
    on_cpu = Machine((8, 64, 1), (1.4, 4.6, 1.0), (1.6, 1.9, 1.0)).run(2000)
    on_accelerator = Machine((8, 64, 1), (1.02, 1.1, 1.0), (1.6, 1.9, 1.0)).run(2000)
    assert on_accelerator.index(1) < 5 * PROBE_ROUNDS
    assert on_cpu.index(1) > 500


@pytest.mark.parametrize("slow", [4.7, 12.0])
def test_no_tree_is_given_up_for_good(slow: float) -> None:
    machine = Machine((8, 64, 1), (1.4, slow, 1.0), (1.6, 1.9, 1.0))
    trees = machine.run(12_000)
    for part in np.array_split(np.array(trees), 2):
        assert set(part.tolist()) == {0, 1, 2}
    machine.seconds[1] = 1.0  # in the end it is the fastest
    machine.run(12_000)
    assert machine.choice.used == 1


def test_trees_that_differ_by_less_than_the_margin_do_not_replace_one_another() -> None:
    machine = Machine((8, 7, 1), (1.4, 1.4, 1.0), (1.60, 1.66, 1.0))
    machine.run(1500)
    assert machine.choice.used == 0
    machine.published[1] = 1.70
    machine.run(3000)
    assert machine.choice.used == 1


def test_one_round_that_was_held_up_decides_nothing() -> None:
    machine = Machine(*MACHINES["the demo on a CPU"])
    machine.run(200)
    for _ in range(20):
        machine.seconds[0] = 1000.0
        machine.run(1)
        machine.seconds[0] = 1.3
        machine.run(30)
        assert machine.choice.used == 0


def test_a_tree_is_tried_for_several_rounds_in_a_row() -> None:
    trees = Machine(*MACHINES["the demo on a CPU"]).run(2000)
    changes = np.flatnonzero(np.diff(trees))
    runs = np.diff(changes)
    assert len(runs) > 10
    assert min(runs) >= PROBE_ROUNDS


def test_times_behind_a_switch_do_not_count_where_there_are_others() -> None:
    choice = TreeChoice([8, 1])
    choice.record(0, 2, 100.0, steady=False)
    assert choice.tokens_per_second() == [0.02, None]
    choice.record(0, 2, 1.0, steady=True)
    choice.record(0, 2, 100.0, steady=False)
    choice.record(0, 2, 0.0, steady=True)  # below the resolution of the clock
    assert choice.tokens_per_second() == [2.0, None]


def test_a_probe_without_steady_rounds_decides_nothing() -> None:
    choice = TreeChoice([8, 1])
    while choice.choose() == 0:
        choice.record(0, 1, 1.45)
    for _ in range(PROBE_ROUNDS):
        choice.record(1, 1, 0.1, steady=False)
        choice.choose()
    assert choice.used == 0
    for _ in range(PROBE_ROUNDS):
        choice.record(1, 1, 0.1)
    assert choice.used == 1


def test_the_same_rounds_are_answered_with_the_same_trees() -> None:
    first, second = (Machine(*MACHINES["a large tree second"], noise=0.2, seed=3) for _ in range(2))
    assert first.run(3000) == second.run(3000)


def test_answers_too_short_to_be_measured_keep_the_first_tree() -> None:
    choice = TreeChoice([8, 64, 1])
    assert {choice.choose() for _ in range(5000)} == {0}  # no round was recorded


def test_answers_of_a_few_rounds_are_enough_to_learn_from() -> None:
    choice = TreeChoice([8, 1])
    for _ in range(60):
        trees = [choice.choose()]
        for number in range(5):
            trees.append(choice.choose())
            tree = trees[number]
            if number < 4:  # the last round of an answer is not recorded
                steady = number > 0 and trees[number - 1] == tree == trees[number + 1]
                choice.record(tree, 1, (1.45, 1.0)[tree], steady=steady)
    assert choice.used == 1


def test_one_thread_at_a_time_is_in_it() -> None:
    choice = TreeChoice([8, 1])
    calls: list[Callable[[], object]] = [choice.choose, lambda: choice.record(0, 1, 1.0), choice.tokens_per_second]
    with ThreadPoolExecutor(max_workers=len(calls)) as pool:
        with choice._lock:
            waiting = [pool.submit(call) for call in calls]
            assert not wait(waiting, timeout=0.05).done
        assert not wait(waiting).not_done


def test_threads_share_what_is_measured() -> None:
    choice = TreeChoice([8, 64, 1])
    seconds, published = (1.45, 5.0, 1.0), (1, 1, 1)

    def answer(rounds: int) -> list[int]:
        trees = [-1, choice.choose()]
        for _ in range(rounds):
            trees.append(choice.choose())
            before, tree, behind = trees[-3:]
            choice.record(tree, published[tree], seconds[tree], steady=before == tree == behind)
        return trees

    with ThreadPoolExecutor(max_workers=4) as pool:
        answers = list(pool.map(answer, [1500] * 4))
    assert choice.used == 2
    chosen = Counter(tree for trees in answers for tree in trees[1:])
    assert chosen[2] > 0.8 * chosen.total()
