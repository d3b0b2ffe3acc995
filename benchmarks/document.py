"""What `medusa-bench` measured, as a JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from medusa_engine.benchmarks.answers import Answers, Way
from medusa_engine.benchmarks.bench import Results
from medusa_engine.benchmarks.hits import depth_rates
from medusa_engine.benchmarks.ledgers import Costs
from medusa_engine.benchmarks.stage_times import BETWEEN, StageTimes
from medusa_engine.benchmarks.stages import STAGES
from medusa_engine.benchmarks.sweep import Sweep

FORMAT = "medusa-bench"
FORMAT_VERSION = 1


def document(found: Results) -> dict[str, Any]:
    """The JSON form: times in milliseconds unless their name says otherwise, every sample in `values`."""
    chosen = asdict(found.settings)
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "settings": {name: _plain(value) for name, value in chosen.items()},
        "manifest": found.manifest,
        "machine": found.machine,
        "versions": found.versions,
        "notes": found.notes,
        "load_seconds": found.load_seconds,
        "trees": [{"name": tree.name, "nodes": tree.nodes, "paths": tree.paths} for tree in found.trees],
        "contexts": [
            {
                "tokens": at.tokens,
                "prefill": at.prefill.document(),
                "plain_step": at.step.document(),
                "rounds": {name: samples.document() for name, samples in at.rounds.items()},
            }
            for at in found.contexts
        ],
        "sweep": _sweep(found.sweep),
        "stages": [_stages(times) for times in found.stages],
        "answers": _answers(found.answers, found),
        "heads": {
            "hit_rates": found.hits.rates,
            "positions": found.hits.positions,
            "accepted": {
                name: [{"path": path, "share": share} for path, share in paths.items()]
                for name, paths in found.acceptance.items()
            },
        },
        "lookup": [rate._asdict() for rate in found.hits.lookup],
        "exact": found.exact,
        "costs": None if found.costs is None else _costs(found.costs),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def _sweep(swept: Sweep) -> dict[str, Any]:
    return {
        "context": swept.context,
        "plain_step": swept.step.document(),
        "grown_on_prompts": swept.grown_on,
        "judged_on_prompts": swept.judged_on,
        "optimum": swept.optimum.tree.name,
        "points": [
            {
                "tree": point.tree.name,
                "nodes": point.tree.nodes,
                "depth": point.tree.depth,
                "grown": point.grown,
                "round": point.rounds.document(),
                "overhead": point.overhead.median,
                "published_per_round": point.published.mean,
                "tokens": point.published.tokens,
                "rounds": point.published.rounds,
                "speed_up": point.speed_up,
                "pays": point.pays,
            }
            for point in swept.points
        ],
    }


def _stages(times: StageTimes) -> dict[str, Any]:
    return {
        "pass": times.name,
        "rows": times.rows,
        "context": times.context,
        "stages": {name: list(times.stage(name)) for name in (*STAGES, BETWEEN)},
        "shares": times.shares(),
        "parts": {name: list(values) for name, values in times.parts.items()},
        "passes": list(times.passes),
    }


def _answers(answers: Answers, found: Results) -> dict[str, Any]:
    depths = {tree.name: tree.depth for tree in found.trees}
    return {
        "prompts": [
            {"category": prompt.category, "name": prompt.name, "tokens": len(prompt.ids), "group": prompt.group}
            for prompt in answers.prompts
        ],
        "ways": [
            {
                "name": way.name,
                "kind": way.kind,
                "version": None if way.other is None else way.other.version,
                **_tally(answers, way, answers.everything),
                "depth_rates": depth_rates(way.tally(answers.everything).published, depths[way.name])
                if way.name in depths and way.tree is not None
                else None,
                "differing": _differing(answers, way),
                "categories": {
                    category: _tally(answers, way, chosen) for category, chosen in answers.categories.items()
                },
                "groups": {group: _tally(answers, way, chosen) for group, chosen in answers.groups.items()},
                "answers": _each(answers, way),
            }
            for way in answers.ways
        ],
    }


def _differing(answers: Answers, way: Way) -> list[dict[str, Any]]:
    told = ("prompt", "token", "repeat") if answers.repeats > 1 else ("prompt", "token")
    return [{name: getattr(difference, name) for name in told} for difference in answers.differing(way)]


def _each(answers: Answers, way: Way) -> list[dict[str, Any]]:
    """Those that count, with the seconds of every repeat where there are several."""
    each = [asdict(answer) for answer in way.answers]
    if answers.repeats > 1:
        for entry, repeats in zip(each, zip(*way.repeats, strict=True), strict=True):
            entry["repeat_seconds"] = [answer.seconds for answer in repeats]
    return each


def _tally(answers: Answers, way: Way, chosen: Sequence[int]) -> dict[str, Any]:
    tally = way.tally(chosen)
    repeated = {"repeat_speed_ups": answers.speed_ups(way, chosen)} if answers.repeats > 1 else {}
    return {
        "tokens": tally.tokens,
        "seconds": tally.seconds,
        "tokens_per_second": tally.tokens_per_second,
        "speed_up": answers.speed_up(way, chosen),
        "rounds": len(tally.published),
        "published_per_round": tally.per_round,
        "distribution": {str(count): share for count, share in tally.distribution().items()},
        "percentiles": {f"p{rank}": value for rank, value in tally.percentiles().items()},
        "rounds_per_tree": tally.rounds_per_tree,
        **repeated,
    }


def _costs(costs: Costs) -> dict[str, Any]:
    machine = costs.rates.machine
    return {
        "measured": {
            "memory_reads": costs.rates.read.document(),
            "matrix_products": costs.rates.product.document(),
            "bytes_per_second": machine.bytes_per_second,
            "flops_per_second": machine.flops_per_second,
        },
        "ledgers": [
            {
                "counted": asdict(ledger),
                "measured_seconds": {name: value.value for name, value in taken.items()},
            }
            for ledger, taken in costs.ledgers
        ],
        "modelled_round_milliseconds": {str(nodes): 1000 * time.value for nodes, time in costs.roofline.items()},
    }
