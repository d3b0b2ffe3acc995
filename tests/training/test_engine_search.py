"""The search takes the tree that publishes most per second for any T(N), and what it predicts is what is decoded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import Exported, Rigged

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.generation import Generation, Timings
from medusa_engine.runtime.tree import Tree, parse_tree
from medusa_engine.training.calibrate import calibrate
from medusa_engine.training.calibration import Answer, Calibration
from medusa_engine.training.engine_search import MOST_TIMED, EngineSearch, grid, search_for_engine
from medusa_engine.training.round_timing import LEAST_PASSES, RoundCost, RoundTimer, largest_tree
from medusa_engine.training.searched_tree import search_engine, search_nodes, typical_context
from medusa_engine.training.speed_check import Measured, measure
from medusa_engine.training.tree_search import MISS, Hits, Ranks, best_first, expected_published, path_mass, replay

STEP = 0.02  # seconds of a plain step in these tests' imagined engines


def random_ranks(answers: int, *, seed: int) -> list[Ranks]:
    """Answers of four heads, each right at ranks 0 to 3 with these shares, independently."""
    random = np.random.default_rng(seed)
    return [random.choice([0, 1, 2, 3, MISS], size=(50, 4), p=[0.5, 0.2, 0.1, 0.05, 0.15]) for _ in range(answers)]


def heads_alone(ranks: Sequence[Ranks]) -> list[Hits]:
    return [Hits.of_heads(vectors) for vectors in ranks]


def engine_of(
    cost: Callable[[int], float], timed: list[int] | None = None
) -> Callable[[Sequence[Tree]], list[RoundCost]]:
    """An engine whose round of N rows takes cost(N) plain steps; notes what was timed."""

    def time_trees(trees: Sequence[Tree]) -> list[RoundCost]:
        if timed is not None:
            timed.extend(tree.nodes for tree in trees)
        return [RoundCost((STEP * cost(tree.nodes),) * LEAST_PASSES, (STEP,) * LEAST_PASSES) for tree in trees]

    return time_trees


def search(cost: Callable[[int], float], ranks: list[Ranks], timed: list[int] | None = None) -> EngineSearch:
    hits = heads_alone(ranks)
    return search_for_engine(
        hits[::2], hits[1::2], topk=4, max_nodes=64, time_trees=engine_of(cost, timed), report=lambda line: None
    )


COSTS: dict[str, Callable[[int], float]] = {
    "a processor that pays for every row": lambda nodes: 1.0 + 0.06 * nodes,
    "an accelerator that reads weights": lambda nodes: 1.1 + 0.0005 * nodes,
    "one that pays from 20 rows on": lambda nodes: 1.1 + 0.2 * max(0, nodes - 20),
    "steps at multiples of 16": lambda nodes: 1.0 + 0.5 * ((nodes - 1) // 16),
}


def fastest(cost: Callable[[int], float], ranks: list[Ranks]) -> float:
    """The largest speed-up of all sizes and counts, each looked at."""
    speed_ups = []
    for counts in ("marginal", "joint"):
        mass = path_mass(counts, np.concatenate(ranks[::2]), 4)
        for nodes in range(2, 65):
            tree = best_first(mass, nodes=nodes, heads=4, topk=4)
            speed_ups.append(np.mean(replay(tree, heads_alone(ranks[1::2]))) / cost(tree.nodes))
    return float(max(speed_ups))


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_chosen_size_is_the_best_of_all_sizes(cost: Callable[[int], float]) -> None:
    ranks = random_ranks(12, seed=1)
    found = search(cost, ranks)
    assert found.best is not None and found.pays
    published = np.mean(replay(found.best.tree, heads_alone(ranks[1::2])))
    assert found.best.speed_up == pytest.approx(published / cost(found.best.tree.nodes))
    assert found.best.speed_up >= 0.99 * fastest(cost, ranks)


def test_sizes_depend_on_the_engine_alone() -> None:
    ranks = random_ranks(12, seed=1)
    small, large, knee = (search(cost, ranks).tree.nodes for cost in list(COSTS.values())[:3])
    assert small < 12 < knee < 25 < 50 < large


@pytest.mark.parametrize("knee", [5, 7, 13, 21, 29])
def test_sizes_are_refined_around_the_best(knee: int) -> None:
    """The best tree is about the largest before rounds become dear, which is none of the sizes timed first."""
    timed: list[int] = []

    def cost(nodes: int) -> float:
        return 1.1 + 0.3 * max(0, nodes - knee)

    ranks = random_ranks(12, seed=2)
    found = search(cost, ranks, timed)
    assert timed[: len(grid(64))] == grid(64) and knee not in grid(64)
    assert found.best is not None and found.best.speed_up >= 0.99 * fastest(cost, ranks)
    assert found.tree.nodes == knee or knee > 8  # sizes far up differ by less than a percent
    assert timed[-3:] == [found.tree.nodes] * 3  # timed afresh for the prediction
    assert len(timed) <= MOST_TIMED + 3


@pytest.mark.parametrize("most", [2, 3, 5, 16, 24, 63, 100])
def test_grid_ends_at_the_largest_tree(most: int) -> None:
    sizes = grid(most)
    assert sizes[0] == 2 and sizes[-1] == most and sizes == sorted(set(sizes))


def test_expensive_rounds_leave_plain_decoding() -> None:
    found = search(lambda nodes: 4.0 + nodes, random_ranks(8, seed=3))
    assert not found.pays and found.tree.nodes == 1 and found.best is not None and found.best.speed_up < 1.0
    assert found.fewer.heads == 0 or found.fewer.speed_up > 1.0


def test_heads_that_are_never_right_leave_plain_decoding() -> None:
    found = search(lambda nodes: 1.0, [np.full((20, 4), MISS)] * 4)
    assert found.best is None and not found.pays and found.tree.nodes == 1


def test_tree_uses_no_head_that_is_never_right() -> None:
    ranks = random_ranks(12, seed=4)
    for vectors in ranks:
        vectors[:, 2] = MISS
    assert search(COSTS["an accelerator that reads weights"], ranks).tree.depth == 2


def test_heads_that_cost_more_than_they_bring_are_better_not_exported() -> None:
    ranks = random_ranks(12, seed=5)
    for vectors in ranks:
        vectors[:, 1:] = MISS
    # A round costs two steps before any row: the four heads run in each.
    found = search(lambda nodes: 2.0 + 0.01 * nodes, ranks)
    assert found.fewer.heads == 1 and found.fewer.speed_up > 1.2 > 1.0 > found.best.speed_up  # type: ignore[union-attr]


def test_joint_counts_are_used_where_heads_depend_on_one_another() -> None:
    """Head 1 is right at the rank of head 0: half of the marginal products belong to paths that never come."""
    random = np.random.default_rng(6)
    ranks = [np.repeat(random.integers(0, 4, (50, 1)), 4, axis=1) for _ in range(8)]
    found = search(COSTS["a processor that pays for every row"], ranks)
    assert found.best is not None and found.best.counts == "joint"
    report: list[str] = []
    calibration = as_calibration(ranks)
    document = search_nodes(calibration, 9, counts="auto", report=report.append)
    assert document["metadata"]["counts"] == "joint" and any("joint counts: E[G]" in line for line in report)
    marginal = search_nodes(calibration, 9, counts="marginal", report=report.append)
    assert marginal["metadata"]["counts"] == "marginal" and marginal["paths"] != document["paths"]


def test_marginal_counts_are_used_where_both_are_as_good() -> None:
    ranks = [np.zeros((20, 4), dtype=np.int64)] * 4
    assert search(COSTS["a processor that pays for every row"], ranks).best.counts == "marginal"  # type: ignore[union-attr]
    document = search_nodes(as_calibration(ranks), 4, counts="auto", report=lambda line: None)
    assert document["metadata"]["counts"] == "marginal"


def as_calibration(ranks: list[Ranks], topk: int = 4) -> Calibration:
    return Calibration({"model": "none"}, topk, 64, [Answer([1, 2], vectors) for vectors in ranks])


def test_search_for_nodes_records_every_decision() -> None:
    calibration = as_calibration(random_ranks(9, seed=7))
    document = search_nodes(calibration, 17, counts="marginal", report=lambda line: None)
    tree = parse_tree(document | {"name": "t"}, "t")
    assert tree.nodes == 17 == document["metadata"]["nodes"] and document["heads"] == tree.depth
    mass = path_mass("marginal", calibration.ranks, 4)
    decisions = document["metadata"]["selected_in_order"]
    weights = [weight for _, weight in decisions]
    assert weights == sorted(weights, reverse=True) and weights == [mass(tuple(path)) for path, _ in decisions]
    assert {tuple(path) for path, _ in decisions} == set(tree.paths)
    assert document["probabilities"] == [mass(tuple(path)) for path in document["paths"]]
    assert document["metadata"]["expected_published"] == pytest.approx(expected_published(tree, mass))
    assert document["metadata"]["calibration"] == calibration.provenance


def test_tree_smaller_than_asked_for_is_said_to_be() -> None:
    report: list[str] = []
    document = search_nodes(as_calibration([np.zeros((5, 4), np.int64)] * 2), 20, counts="auto", report=report.append)
    assert document["metadata"]["nodes"] == 5
    assert any("5 nodes, not 20" in line for line in report)


@pytest.mark.parametrize("nodes", [0, -3, 65])
def test_number_of_nodes_that_no_tree_has(nodes: int) -> None:
    with pytest.raises(UserError, match=f"--nodes is {nodes}"):
        search_nodes(as_calibration(random_ranks(2, seed=8)), nodes, counts="auto", report=lambda line: None)


def test_one_answer_is_searched_without_a_comparison() -> None:
    report: list[str] = []
    document = search_nodes(as_calibration(random_ranks(1, seed=8)), 6, counts="auto", report=report.append)
    assert document["metadata"]["counts"] == "marginal" and "one answer is too few" in report[0]


def test_intervals_hold_the_estimate_and_widen_with_noise() -> None:
    ranks = random_ranks(24, seed=9)
    best = search(COSTS["a processor that pays for every row"], ranks).best
    assert best is not None
    assert best.published_interval[0] < best.published < best.published_interval[1]
    assert best.speed_up_interval[0] < best.speed_up < best.speed_up_interval[1]

    def noisy(trees: Sequence[Tree]) -> list[RoundCost]:
        times = [STEP * (1.0 + 0.06 * tree.nodes) for tree in trees]
        return [RoundCost((t, 1.3 * t, 0.7 * t, 1.2 * t, 0.8 * t), (STEP,) * 5) for t in times]

    wide = search_for_engine(
        heads_alone(ranks[::2]),
        heads_alone(ranks[1::2]),
        topk=4,
        max_nodes=64,
        time_trees=noisy,
        report=lambda line: None,
    ).best
    assert wide is not None and np.ptp(wide.speed_up_interval) > 2 * np.ptp(best.speed_up_interval)


def rigged_calibration(exported: Exported, rigged: Rigged) -> Calibration:
    prompts = [[token] for token in range(0, 48, 3)]
    return calibrate(exported.engine, prompts, max_new_tokens=24, provenance={}, progress=lambda done, tokens: None)


def test_real_engine_is_timed_searched_and_measured(rigged_64: Exported, rigged_heads: Rigged) -> None:
    calibration = rigged_calibration(rigged_64, rigged_heads)
    report: list[str] = []
    document = search_engine(calibration, rigged_64.engine, counts="auto", measured_answers=3, report=report.append)
    facts = document["metadata"]
    predicted, measured = facts["predicted"], facts["measured"]
    tree = parse_tree(predicted["paths"], "predicted")
    # Which tree is best depends on the machine; what it publishes does not.
    assert predicted["published"] == pytest.approx(np.mean(replay(tree, calibration.sequences[1::4])))
    held_out = [[token] for token in range(0, 48, 3)][3::4][:3]
    rounds = [count for prompt in held_out for count in rigged_heads.published_per_round(prompt, tree, 24)]
    assert measured["published"] == pytest.approx(np.mean(rounds))
    assert measured["prompts"] == 3 and measured["tokens"] == 72 and measured["answers_that_differ"] == 0
    assert document["paths"] == ([list(path) for path in tree.paths] if facts["speculation_pays"] else [])
    assert facts["heads"] == parse_tree(document["paths"], "t").depth
    text = "\n".join(report)
    for said in ("plain step", "chosen:", "predicted: E[G]", "measured:  E[G]", "predicted over measured"):
        assert said in text
    json.dumps(document)


def test_engine_without_heads_is_searched_for_a_chain_of_lookups(no_heads: Exported) -> None:
    prompts = [[token, token + 1] for token in range(0, 48, 6)]
    calibration = calibrate(
        no_heads.engine, prompts, max_new_tokens=40, provenance={}, progress=lambda done, tokens: None
    )
    report: list[str] = []
    document = search_engine(
        calibration, no_heads.engine, counts="auto", measured_answers=2, lookup=4, report=report.append
    )
    facts = document["metadata"]
    tree = parse_tree(facts["predicted"]["paths"], "predicted")
    assert tree.lookup == tree.nodes - 1 == facts["predicted"]["lookup"] and facts["predicted"]["heads"] == 0
    assert facts["predicted"]["published"] == pytest.approx(np.mean(replay(tree, calibration.sequences[1::4])))
    held_out = calibration.sequences[3::4]
    assert facts["measured"]["published"] == pytest.approx(np.mean(replay(tree, held_out)))
    assert facts["measured"]["answers_that_differ"] == 0
    assert any(f"0 of 0 heads, {tree.lookup} lookup nodes" in line for line in report)


def test_lookup_gets_its_rows_on_every_engine_and_heads_that_add_nothing_are_said_to() -> None:
    random = np.random.default_rng(8)
    ranks = random_ranks(12, seed=8)
    runs = [random.choice([0, 1, 2, 3], size=50, p=[0.4, 0.1, 0.1, 0.4]) for _ in ranks]
    hits = [Hits(*each) for each in zip(ranks, runs, strict=True)]
    cost = COSTS["a processor that pays for every row"]
    options: Any = {"topk": 4, "max_nodes": 64, "time_trees": engine_of(cost), "report": lambda line: None}
    alone = search_for_engine(hits[::2], hits[1::2], **options)
    both = search_for_engine(hits[::2], hits[1::2], lookup=4, **options)
    assert alone.best is not None and both.best is not None
    assert alone.tree.lookup == 0 and both.tree.lookup > 0 and both.tree.heads > 0
    assert both.best.speed_up > 1.1 * alone.best.speed_up
    assert both.best.published == pytest.approx(np.mean(replay(both.tree, hits[1::2])))
    missing = [Hits(np.full_like(each.ranks, MISS), each.runs) for each in hits]
    found = search_for_engine(missing[::2], missing[1::2], lookup=4, **options)
    assert found.tree.lookup == 3 and (found.fewer.heads, found.fewer.nodes) == (0, 4)


def test_measuring_can_be_left_out(rigged_64: Exported, rigged_heads: Rigged) -> None:
    calibration = rigged_calibration(rigged_64, rigged_heads)
    document = search_engine(
        calibration, rigged_64.engine, counts="joint", measured_answers=0, report=lambda line: None
    )
    assert "measured" not in document["metadata"] and document["metadata"]["predicted"]["counts"] == "joint"


def test_search_for_an_engine_needs_answers_for_its_three_parts(rigged_64: Exported) -> None:
    with pytest.raises(UserError, match="has 3 answers"):
        search_engine(
            as_calibration(random_ranks(3, seed=1)),
            rigged_64.engine,
            counts="auto",
            measured_answers=1,
            report=lambda line: None,
        )


def test_measured_answers_are_those_of_the_engine(rigged_64: Exported, rigged_heads: Rigged) -> None:
    tree = parse_tree([[0], [1], [0, 0], [0, 1], [1, 0]], "six rows")
    answers = rigged_calibration(rigged_64, rigged_heads).answers[:3]
    done: list[int] = []
    measured = measure(rigged_64.engine, tree, answers, progress=done.append)
    assert done == [1, 2, 3] and measured.differing == 0
    for answer, speculative, plain in zip(answers, measured.speculative, measured.plain, strict=True):
        assert plain.token_ids == rigged_heads.answer(answer.prompt_ids, 24) == speculative.token_ids
        assert plain.published_per_round == [1] * 24
        assert speculative.published_per_round == replay(tree, [answer.hits])


def generation(published: list[int], seconds: float, token: int = 1) -> Generation:
    tokens = [token] * sum(published)
    rounds = [seconds / len(published)] * len(published)
    return Generation(None, tokens, "length", 1, published, rounds, Timings(0.0, 9.0, seconds))


def test_measured_figures_of_given_answers() -> None:
    """Worked by hand: 12 tokens in 6 rounds; 12 tokens in 3 s against 4.5 s; the second pair differs."""
    speculative = [generation([2, 2, 2], 2.0), generation([3, 1, 2], 1.0)]
    plain = [generation([1] * 6, 2.5), generation([1] * 6, 2.0, token=2)]
    measured = Measured(speculative, plain)
    assert measured.published == pytest.approx(2.0) and measured.speed_up == pytest.approx(1.5)
    assert measured.differing == 1
    published, speed_up = measured.intervals()
    assert published == pytest.approx((2.0, 2.0)) and speed_up == pytest.approx((1.25, 2.0))


def test_rounds_are_timed_with_room_for_the_whole_tree(rigged_64: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the end of the cache a tree shrinks; what is timed then is not the tree."""
    engine = rigged_64.engine
    assert largest_tree(engine.limits) == 32
    tree = best_first(lambda path: 0.5 ** sum(1 + rank for rank in path), nodes=32, heads=4, topk=10)
    new_state, verified = engine.backend.new_state, []

    def observed() -> Any:
        state = new_state()
        round_ = state.round

        def round_with(tree_: Any, next_tree: Any) -> None:
            verified.append(len(tree_.tree_indices))
            round_(tree_, next_tree)

        monkeypatch.setattr(state, "round", round_with)
        return state

    monkeypatch.setattr(engine.backend, "new_state", observed)
    (cost,) = RoundTimer(engine, context=1000)([tree])
    assert set(verified) == {32}
    assert len(cost.rounds) == len(cost.steps) >= LEAST_PASSES and min(cost.rounds + cost.steps) > 0.0


def test_cache_too_small_for_rounds_is_refused(rigged_64: Exported) -> None:
    engine = Engine.open(rigged_64.bundle, threads=1)
    engine.limits = dataclasses.replace(engine.limits, max_length=16)
    with pytest.raises(UserError, match="16 tokens"):
        RoundTimer(engine, context=4)


def test_context_is_half_way_through_the_median_answer(tmp_path: Path) -> None:
    answers = [Answer([1] * prompt, np.zeros((tokens, 4), np.int64)) for prompt, tokens in ((5, 10), (9, 40), (30, 8))]
    assert typical_context(Calibration({}, 4, 64, answers)) == 29  # 10, 29, 34
