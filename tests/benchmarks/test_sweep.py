"""Trees of the sweep have as many nodes as were asked for, and what heads get right is counted as rounds take it."""

from __future__ import annotations

import numpy as np
import pytest

from medusa_engine.benchmarks.answers import PLAIN, TREE, Answered, Answers, Way
from medusa_engine.benchmarks.hits import depth_rates, hit_rates, lookup_rates
from medusa_engine.benchmarks.measure import Samples
from medusa_engine.benchmarks.prompt_file import BenchPrompt
from medusa_engine.benchmarks.sweep import Sweep, SweepPoint, grow, most_nodes
from medusa_engine.runtime.manifest import Limits
from medusa_engine.runtime.roofline import Published
from medusa_engine.runtime.tree import Tree
from medusa_engine.training.lookup_hits import Lookups
from medusa_engine.training.tree_search import END, MISS, Hits

# Two answers of 4 and 3 tokens with two heads; the vector behind each token.
FIRST = Hits.of_heads(np.array([[0, 1], [1, 0], [0, END], [END, END]]))
SECOND = Hits.of_heads(np.array([[MISS, 0], [0, 0], [MISS, END]]))


def limits(**sizes: int) -> Limits:
    values = {"layers": 1, "kv_heads": 1, "head_dim": 2, "cache_rows": 70, "max_length": 64, "vocab_size": 9}
    return Limits(**{**values, "heads": 2, "topk": 3, "max_tree_nodes": 64, **sizes})


def test_largest_tree_has_every_path_or_all_nodes() -> None:
    assert most_nodes(limits()) == 1 + 3 + 9
    assert most_nodes(limits(max_tree_nodes=7)) == 7
    assert most_nodes(limits(heads=4, topk=10)) == 64
    assert most_nodes(limits(heads=1, topk=1)) == 2


@pytest.mark.parametrize("nodes", range(1, 14))
def test_a_grown_tree_has_exactly_so_many_nodes(nodes: int) -> None:
    tree = grow(nodes, [FIRST, SECOND], limits())
    assert tree.nodes == nodes and tree.name == f"best {nodes}"


def test_a_grown_tree_begins_with_what_was_seen() -> None:
    # Of 7 vectors 3 begin with 0, 1 with 1; (0, 1), (1, 0) and (0, 0) were seen once each.
    assert grow(2, [FIRST, SECOND], limits()).paths == ((0,),)
    assert set(grow(6, [FIRST, SECOND], limits()).paths) == {(0,), (1,), (0, 0), (0, 1), (1, 0)}


def lookup_hits(*runs: int) -> Hits:
    """Without heads."""
    return Hits(np.zeros((len(runs), 0), dtype=np.int64), np.array(runs))


def test_a_grown_tree_has_lookup_nodes_where_they_publish_more() -> None:
    both = limits(lookup=3)
    copied = Hits(FIRST.ranks, np.array([3, 2, 1, 0]))
    assert grow(4, [copied], both).document() == [["L"], ["L", "L"], ["L", "L", "L"]]
    assert most_nodes(both) == 1 + 3 + 9 + 3
    assert [grow(nodes, [FIRST, SECOND], both).nodes for nodes in range(1, 17)] == list(range(1, 17))
    assert grow(16, [FIRST, SECOND], both).lookup == 3
    alone = limits(heads=0, lookup=3)
    assert most_nodes(alone) == 4
    for answers in ([lookup_hits(0, 0)], [lookup_hits(2, 1)]):
        assert [grow(nodes, answers, alone).document() for nodes in (1, 3)] == [[], [["L"], ["L", "L"]]]


def test_lookup_rates_are_shares_of_the_positions_that_have_tokens_behind_them() -> None:
    lookups = Lookups(np.array([3, 3, 0, 1, 3]), np.array([2, 0, 0, 1, 1]), np.array([4, 3, 2, 2, 1]))
    assert lookup_rates([lookups], 2) == [
        (3, 2 / 4, [1 / 2, 1 / 2]),
        (2, 0, [0, 0]),
        (1, 1 / 4, [1, 0]),
        (0, 1 / 4, [0, 0]),
        (None, 1, [1 / 2, 1 / 4]),
    ]


def test_lookup_rates_end_with_the_longest_answer() -> None:
    lookups = Lookups(np.array([3, 3, 3]), np.array([2, 1, 0]), np.array([2, 2, 1]))
    assert lookup_rates([lookups], 64)[0] == (3, 1, [1, 1 / 2])


def test_hit_rates_are_shares_of_the_positions_that_have_a_label() -> None:
    hits = hit_rates([FIRST, SECOND], topk=3)
    assert hits.positions == [6, 4]
    assert hits.rates == [[3 / 6, 1 / 6, 0], [3 / 4, 1 / 4, 0]]
    assert hits.missed(0) == pytest.approx(2 / 6) and hits.missed(1) == 0


def test_depth_rates_are_of_the_rounds_that_got_there() -> None:
    assert depth_rates([1, 1, 2, 3, 3, 3], 3) == [4 / 6, 3 / 4, 0.0]
    assert depth_rates([1, 1], 2) == [0.0, 0.0]


def point(nodes: int, tokens: int, rounds: float) -> SweepPoint:
    tree = Tree(tuple((rank,) for rank in range(nodes - 1)), f"{nodes}")
    samples = Samples(tree.name, "ms", (rounds,))
    return SweepPoint(tree, True, samples, Samples("", "x", (rounds / 10,)), Published(tokens, 100))


def test_the_optimum_is_the_fastest_and_break_even_lies_at_the_overhead() -> None:
    points = [point(1, 100, 10.0), point(2, 150, 12.0), point(4, 180, 14.0), point(8, 200, 20.0), point(16, 210, 30.0)]
    swept = Sweep(256, Samples("step", "ms", (10.0,)), points, 1, 1)
    assert [one.speed_up for one in points] == [pytest.approx(value) for value in (1, 1.25, 9 / 7, 1, 0.7)]
    assert swept.optimum is points[2]
    assert [one.pays for one in points] == [False, True, True, False, False]  # E[G] has to be more than T(N)/T(1)


def test_answers_that_end_early_differ_where_they_end() -> None:
    def way(kind: str, *answers: list[int]) -> Way:
        return Way(kind, kind, repeats=[[Answered(ids, len(ids), 1.0, [1.0], [len(ids)]) for ids in answers]])

    prompts = [BenchPrompt("a", "", [1]), BenchPrompt("b", "", [1]), BenchPrompt("a", "", [1])]
    plain = way(PLAIN, [1, 2, 3], [4, 5], [6])
    other = way(TREE, [1, 2], [4, 7], [6])
    answers = Answers(prompts, [plain, other])
    assert answers.groups == {}
    grouped = [BenchPrompt("a", "", [1], "x"), BenchPrompt("b", "", [1], "y"), BenchPrompt("a", "", [1], "x")]
    assert Answers(grouped, [plain]).groups == {"x": [0, 2], "y": [1]}
    assert answers.differing(other) == [(0, 2, 0), (1, 1, 0)] and answers.differing(plain) == []
    assert answers.categories == {"a": [0, 2], "b": [1]}
    assert answers.speed_up(other, [0, 2]) == pytest.approx((3 / 2) / (4 / 2))
