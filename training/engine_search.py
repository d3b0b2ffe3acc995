"""The tree that publishes most tokens per second on the engine and machine at hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.rounds import CHUNK_ROWS, TreePlan
from medusa_engine.runtime.tree import Tree
from medusa_engine.training.calibrate import Calibration
from medusa_engine.training.tree_search import (
    Ranks,
    best_first,
    joint_mass,
    marginal_mass,
    rank_mass,
    replay,
)

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128)
CONTEXT = 256  # tokens in the cache while rounds are timed
REPEATS = 9
BOOTSTRAP = 400


def search_for_engine(
    engine: Engine, calibration: Calibration, *, report: Callable[[str], None]
) -> tuple[Tree, dict[str, Any]]:
    """Search trees of several sizes on one half of the answers, judge them on the other, time the engine's rounds.

    Joint and marginal counts both propose; the ones whose tree is predicted faster win.

    Returns:
        The tree, and what was predicted: E[G] with its 90% interval, milliseconds per round and per plain step,
        speed-up over plain steps, and which counts were used.
    """
    searched, judged = calibration.sequences[::2], calibration.sequences[1::2] or calibration.sequences[::2]
    ranks = np.concatenate(searched)
    proposals = {"joint": joint_mass(ranks), "marginal": marginal_mass(rank_mass(ranks, calibration.topk))}
    sizes = [size for size in SIZES if size <= engine.limits.max_tree_nodes]
    trees = {
        (counts, size): best_first(mass, nodes=size, heads=calibration.heads, topk=calibration.topk)
        for counts, mass in proposals.items()
        for size in sizes
    }
    step, rounds = time_rounds(engine, [trees["marginal", size] for size in sizes])
    best: tuple[float, tuple[str, int]] = (0.0, ("joint", 1))
    for index, size in enumerate(sizes):
        line = f"{size:4} nodes  {1000 * rounds[index]:7.1f} ms"
        for counts in proposals:
            published = replay(trees[counts, size], judged)
            speed_up = float(np.mean(published)) * step / rounds[index]
            best = max(best, (speed_up, (counts, size)))
            line += f"   {counts}: E[G] {np.mean(published):.3f}, {speed_up:.3f} x"
        report(line)
    speed_up, (counts, size) = best
    tree = trees[counts, size]
    low, high = published_interval(tree, judged)
    seconds = rounds[sizes.index(size)]
    report(f"plain step {1000 * step:.1f} ms; chosen: {tree.nodes} nodes on {counts} counts, {speed_up:.3f} x")
    return tree, {
        "counts": counts,
        "expected_published": float(np.mean(replay(tree, judged))),
        "expected_published_90": [low, high],
        "round_milliseconds": 1000 * seconds,
        "step_milliseconds": 1000 * step,
        "predicted_speed_up": speed_up,
        "predicted_speed_up_90": [low * step / seconds, high * step / seconds],
    }


def time_rounds(engine: Engine, trees: Sequence[Tree]) -> tuple[float, list[float]]:
    """Median seconds of a plain step and of a round of each tree at a context of CONTEXT tokens, interleaved."""
    limits = engine.limits
    context = min(CONTEXT, limits.max_length // 2)
    tokens = np.random.default_rng(0).integers(0, limits.vocab_size, size=context)
    for speculation in (True, False):
        engine.backend.load(speculation=speculation)
    plans = [TreePlan(tree, limits) for tree in trees]
    samples: list[list[float]] = [[] for _ in range(len(plans) + 1)]
    for repeat in range(REPEATS + 1):
        for index, plan in enumerate([None, *plans]):
            state = engine.backend.new_state()
            next_tree = None if plan is None else plan.full
            for start in range(0, context, CHUNK_ROWS):
                state.prefill(tokens[start : start + CHUNK_ROWS], start, next_tree)
            started = time.perf_counter()
            if plan is None:
                state.step()
            else:
                state.round(plan.full, plan.full)
            if repeat:  # the first pass of each shape warms up
                samples[index].append(time.perf_counter() - started)
    step, *rounds = (median(times) for times in samples)
    return step, rounds


def published_interval(tree: Tree, sequences: Sequence[Ranks]) -> tuple[float, float]:
    """Bootstrap over answers: the middle 90% of E[G]."""
    rounds = [replay(tree, [ranks]) for ranks in sequences]
    generator = np.random.default_rng(0)
    means = []
    for _ in range(BOOTSTRAP):
        drawn = generator.integers(0, len(rounds), size=len(rounds))
        published = [count for index in drawn for count in rounds[index]]
        means.append(float(np.mean(published)))
    return float(np.quantile(means, 0.05)), float(np.quantile(means, 0.95))
