"""A search from the calibration to the tree file, for a number of nodes or for an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.tree import Tree, TreePath, entry_of
from medusa_engine.training.calibration import Calibration
from medusa_engine.training.engine_search import EngineSearch, Prediction, search_for_engine
from medusa_engine.training.lookup_search import best_orders
from medusa_engine.training.node_probabilities import calibrated_probabilities
from medusa_engine.training.round_timing import RoundTimer, largest_tree
from medusa_engine.training.speed_check import Measured, measure
from medusa_engine.training.tree_search import Hits, expected_published, path_mass, replay, tree_of
from medusa_engine.training.tree_settings import AUTO, COUNTS

LEAST_ANSWERS = 4  # an engine search needs some to search on, some to judge, some to measure
FAR_OFF = 0.1  # a prediction is expected to be nearer

Report = Callable[[str], None]


def search_nodes(
    calibration: Calibration, nodes: int, *, counts: str, report: Report, lookup: int = 0
) -> dict[str, Any]:
    """The document of the best tree of that many nodes.

    Args:
        nodes: root included.
        lookup: lookup nodes at most; none where the calibration has no tokens to look up.
        counts: one of COUNTS, or AUTO for the ones whose tree publishes more on answers it was not searched on.
        report: called with lines for people.

    Raises:
        UserError: `nodes` is below 1, or above what the calibrated engine runs.
    """
    if nodes < 1:
        raise UserError(f"--nodes is {nodes}", "give 1 or more: the root counts")
    if nodes > calibration.max_tree_nodes:
        raise UserError(
            f"--nodes is {nodes}, but the calibrated engine runs trees of"
            f" {counted(calibration.max_tree_nodes, 'node')}",
            f"give fewer, or export with medusa-export --max-tree-nodes {nodes}",
        )
    used = _better_counts(calibration, nodes, lookup, report) if counts == AUTO else counts
    order = _order(calibration, calibration.sequences, nodes, used, lookup)
    tree = tree_of(order)
    document = tree_document(calibration, tree, used, order=order)
    report(f"{tree.sizes}, {used} counts: E[G] {document['metadata']['expected_published']:.3f}")
    if tree.nodes < nodes:
        report(f"every other path has {used} probability 0: the tree has {counted(tree.nodes, 'node')}, not {nodes}")
    return document


def _order(calibration: Calibration, answers: Sequence[Hits], nodes: int, counts: str, lookup: int) -> list[TreePath]:
    """The paths of the best tree of `nodes` rows, or of the largest one that there is."""
    orders = best_orders(counts, answers, nodes=nodes, heads=calibration.heads, topk=calibration.topk, lookup=lookup)
    return orders[max(orders)] if orders else []


def search_engine(
    calibration: Calibration,
    engine: Engine,
    *,
    counts: str,
    measured_answers: int,
    report: Report,
    lookup: int = 0,
) -> dict[str, Any]:
    """The document of the tree that publishes most tokens per second on an engine, with predictions and measurements.

    One half of the answers is searched on, one quarter judges, and of the last quarter up to `measured_answers` are
    decoded again, plainly and with the tree, to see whether the prediction holds. Where plain decoding is faster, the
    tree is the root alone, and what was measured is the best one that is more.

    Args:
        counts: as of `search_nodes`.
        lookup: lookup nodes at most, no more than the engine offers.

    Raises:
        UserError: the calibration has too few answers.
    """
    if measured_answers < 0:
        raise UserError(f"--measure is {measured_answers}", "give 0 or more")
    if len(calibration.answers) < LEAST_ANSWERS:
        raise UserError(
            f"the calibration has {counted(len(calibration.answers), 'answer')}, a search for an engine needs"
            f" {LEAST_ANSWERS}",
            "calibrate on more prompts, better 40 or more",
        )
    timer = RoundTimer(engine, context=typical_context(calibration))
    report(f"timing rounds at a context of {counted(timer.context, 'token')}")
    found = search_for_engine(
        calibration.sequences[0::2],
        calibration.sequences[1::4],
        topk=calibration.topk,
        max_nodes=largest_tree(engine.limits),
        lookup=lookup,
        time_trees=timer,
        report=report,
        counts=COUNTS if counts == AUTO else (counts,),
    )
    best, tree = found.best, found.tree
    used = best.counts if best is not None else COUNTS[0]
    document = tree_document(calibration, tree, used)
    facts = document["metadata"]
    facts["speculation_pays"] = found.pays
    facts["heads_to_export"] = vars(found.fewer)
    if best is not None:
        _report_choice(found, best, engine, report)
        facts["predicted"] = _predicted(best)
        held_out = calibration.answers[3::4][:measured_answers]
        if held_out:
            measured = measure(
                engine, best.tree, held_out, progress=lambda done: report(f"{done}/{len(held_out)} prompts measured")
            )
            facts["measured"] = _measured(measured)
            _report_measured(best, measured, report)
    return document


def typical_context(calibration: Calibration) -> int:
    """Tokens in the cache half-way through an answer, the median of the answers."""
    return int(median(len(answer.prompt_ids) + len(answer.ranks) // 2 for answer in calibration.answers))


def tree_document(
    calibration: Calibration, tree: Tree, counts: str, *, order: Sequence[TreePath] | None = None
) -> dict[str, Any]:
    """The tree file without its name, with `calibrated_probabilities` in the paths' order.

    Args:
        order: in which the paths were chosen; kept with what each added to E[G].
    """
    probabilities = calibrated_probabilities(tree, calibration, counts)
    metadata: dict[str, Any] = {
        "counts": counts,
        "nodes": tree.nodes,
        "heads": tree.heads,
        "lookup": tree.lookup,
        "expected_published": expected_published(tree, probabilities.__getitem__),
        "calibration": calibration.provenance,
    }
    if order is not None:
        gains = _gains(calibration, order, counts)
        metadata["selected_in_order"] = [[entry_of(path), gain] for path, gain in zip(order, gains, strict=True)]
    return {
        "description": f"{tree.sizes}, best first on {counts} counts of {counted(len(calibration.ranks), 'position')}",
        "heads": tree.heads,
        "topk": calibration.topk,
        "probabilities": [probabilities[path] for path in tree.paths],
        "metadata": metadata,
        "paths": tree.document(),
    }


def _gains(calibration: Calibration, order: Sequence[TreePath], counts: str) -> list[float]:
    """What each path adds to E[G]: its weight; beside lookup nodes, replayed behind the paths before it."""
    if not tree_of(order).lookup:
        mass = path_mass(counts, calibration.ranks, calibration.topk)
        return [mass(path) for path in order]
    published = [fmean(replay(tree_of(order[:size]), calibration.sequences)) for size in range(len(order) + 1)]
    return [after - before for before, after in pairwise(published)]


def _better_counts(calibration: Calibration, nodes: int, lookup: int, report: Report) -> str:
    """The counts whose tree, searched on every other answer, publishes more on the rest; marginal if both do."""
    searched, judged = calibration.sequences[0::2], calibration.sequences[1::2]
    if not judged:
        report(f"one answer is too few to compare counts: {COUNTS[0]} ones used")
        return COUNTS[0]
    published = {}
    for counts in COUNTS:
        tree = tree_of(_order(calibration, searched, nodes, counts, lookup))
        here, published[counts] = fmean(replay(tree, searched)), fmean(replay(tree, judged))
        report(
            f"{counts} counts of {counted(len(searched), 'answer')} predict E[G] {here:.3f};"
            f" on the other {len(judged)} it is {published[counts]:.3f}"
        )
    return max(COUNTS, key=lambda counts: published[counts])


def _report_choice(found: EngineSearch, best: Prediction, engine: Engine, report: Report) -> None:
    heads, tree = engine.limits.heads, best.tree
    looked_up = f", {counted(tree.lookup, 'lookup node')}" if engine.limits.lookup else ""
    used = f"{tree.heads} of {counted(heads, 'head')}{looked_up}"
    sizes = f"{counted(tree.nodes, 'node')}, {used}, {best.counts} counts"
    report(f"plain step {1000 * best.cost.step_seconds:.1f} ms, round {1000 * best.cost.seconds:.1f} ms")
    if found.pays:
        report(f"chosen: {sizes}")
    else:
        report("chosen: plain decoding, the root alone: speculation does not pay here (medusa-run --no-speculation)")
        report(f"the best tree: {sizes}")
    fewer = found.fewer
    if fewer.nodes > 1 and fewer.heads < heads:
        report(
            f"exported with {fewer.heads} of the {counted(heads, 'head')}, {fewer.nodes} nodes are estimated to reach"
            f" {fewer.speed_up:.2f} x: all heads of an engine run where any is asked"
        )
    report(
        f"predicted: E[G] {_range(best.published, best.published_interval)},"
        f" speed {_range(best.speed_up, best.speed_up_interval)} x plain decoding"
    )


def _report_measured(best: Prediction, measured: Measured, report: Report) -> None:
    published_interval, speed_up_interval = measured.intervals()
    report(
        f"measured:  E[G] {_range(measured.published, published_interval)},"
        f" speed {_range(measured.speed_up, speed_up_interval)} x, on {counted(len(measured.plain), 'other prompt')}"
    )
    off = best.published / measured.published - 1, best.speed_up / measured.speed_up - 1
    report(f"predicted over measured: E[G] {100 * off[0]:+.1f}%, speed {100 * off[1]:+.1f}%")
    if max(map(abs, off)) > FAR_OFF:
        report("more than 10% off: calibrate on more prompts of one kind, and measure on a quiet machine")
    if measured.differing:
        differing = counted(measured.differing, "answer")
        report(f"other than plain decoding: {differing}, where two logits are nearly equal")


def _predicted(best: Prediction) -> dict[str, Any]:
    return {
        "nodes": best.tree.nodes,
        "heads": best.tree.heads,
        "lookup": best.tree.lookup,
        "paths": best.tree.document(),
        "counts": best.counts,
        "published": best.published,
        "published_90": best.published_interval,
        "speed_up": best.speed_up,
        "speed_up_90": best.speed_up_interval,
        "round_milliseconds": 1000 * best.cost.seconds,
        "step_milliseconds": 1000 * best.cost.step_seconds,
    }


def _measured(measured: Measured) -> dict[str, Any]:
    published_interval, speed_up_interval = measured.intervals()
    return {
        "prompts": len(measured.plain),
        "tokens": sum(answer.generated_tokens for answer in measured.plain),
        "published": measured.published,
        "published_90": published_interval,
        "speed_up": measured.speed_up,
        "speed_up_90": speed_up_interval,
        "answers_that_differ": measured.differing,
    }


def _range(value: float, interval: tuple[float, float]) -> str:
    return f"{value:.2f} ({interval[0]:.2f} to {interval[1]:.2f})"
