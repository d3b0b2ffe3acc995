"""Run everything that `medusa-bench` measures, one thing after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from medusa_engine.benchmarks.answers import Answers, answer_all
from medusa_engine.benchmarks.hits import HitRates, hit_rates
from medusa_engine.benchmarks.ledgers import Costs, count_costs
from medusa_engine.benchmarks.measure import Samples, interleaved, machine, versions
from medusa_engine.benchmarks.passes import FixedContext
from medusa_engine.benchmarks.prompt_file import read_prompts
from medusa_engine.benchmarks.rates import measure_rates
from medusa_engine.benchmarks.settings import (
    CONTEXTS,
    SWEEP,
    BenchSettings,
    check_settings,
    contexts,
    left_out,
    named_trees,
    sweep_nodes,
)
from medusa_engine.benchmarks.stage_times import WARM_UP, StageTimes, profile_passes
from medusa_engine.benchmarks.sweep import Sweep, sweep
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.model_facts import facts_of
from medusa_engine.runtime.onnxruntime_backend import OnnxRuntimeBackend
from medusa_engine.runtime.tree import Tree, TreePath
from medusa_engine.training.calibrate import calibrate
from medusa_engine.training.tree_search import node_acceptance

Steps = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""Shows the progress of something that has so many steps; what the block gets is called behind each."""

_INTERLEAVED_WARM_UP = 2
_RATE_REPEATS = 5


@dataclass(frozen=True)
class AtContext:
    """Passes behind a number of committed rows, all in milliseconds.

    Attributes:
        tokens: in the cache.
        prefill: of running them all; repeated a fifth as often.
        step: a plain step.
        rounds: by tree.
    """

    tokens: int
    prefill: Samples
    step: Samples
    rounds: dict[str, Samples]


@dataclass(frozen=True)
class Results:
    """Everything that was measured.

    Attributes:
        settings: as asked for.
        manifest: of the bundle, its JSON form.
        machine, versions: that it ran on and with.
        load_seconds: opening the bundle and loading rounds and plain steps.
        trees: the named ones: the bundle's first.
        contexts, sweep, answers, hits: see there.
        stages: of a plain step, then of each named tree.
        acceptance: by name of the tree: share of its rounds in which each path was accepted.
        costs: None unless asked for.
        notes: what else the reader should know.
    """

    settings: BenchSettings
    manifest: dict[str, Any]
    machine: dict[str, object]
    versions: dict[str, str]
    load_seconds: float
    trees: list[Tree]
    contexts: list[AtContext]
    sweep: Sweep
    stages: list[StageTimes]
    answers: Answers
    hits: HitRates
    acceptance: dict[str, dict[TreePath, float]]
    costs: Costs | None
    notes: list[str]

    @property
    def exact(self) -> bool:
        """Whether every answer of the engine, in every repeat, is the first one of its plain steps."""
        return not any(self.answers.differing(way) for way in self.answers.ways if way.other is None)


def run_bench(settings: BenchSettings, steps: Steps) -> Results:
    """Measure an engine.

    Args:
        steps: shows the progress.

    Raises:
        UserError: an option, a file or the bundle cannot be used; before anything is measured.
    """
    check_settings(settings)
    started = time.perf_counter()
    engine = Engine.open(settings.engine, threads=settings.threads)
    if not isinstance(engine.backend, OnnxRuntimeBackend):
        raise UserError(f"{settings.engine}: stages and passes are timed on ONNX Runtime", "give a bundle folder")
    facts = facts_of(engine.manifest) if settings.ledger else None
    trees, nodes = named_trees(settings, engine), sweep_nodes(settings, engine)
    tokens = contexts(settings, engine, max(*nodes, *(tree.nodes for tree in trees)))
    prompts, too_long = read_prompts(settings.prompts, engine)
    notes = [] if settings.sweep else left_out(nodes, SWEEP, "trees of")
    notes += [] if settings.contexts else left_out(tokens, CONTEXTS, "contexts of")
    notes += [f"{too_long} of our own prompts: left out, the engine is too small for them"] if too_long else []
    untrained = engine.limits.heads and not engine.manifest.heads_trained
    notes += ["the heads are untrained: expect no speed-up from them"] if untrained else []
    for speculation in (True, False):
        engine.load(speculation=speculation)
    load_seconds = time.perf_counter() - started
    others = _open_others(settings, engine)

    at_contexts = [_at_context(engine, trees, count, settings.repeats, steps) for count in tokens]
    with steps("heads and lookup on every token", len(prompts)) as step:
        calibration = calibrate(
            engine,
            [prompt.ids for prompt in prompts],
            max_new_tokens=settings.max_new_tokens,
            provenance={},
            progress=lambda _answers, _tokens: step(),
        )
    sequences = calibration.sequences
    lookups = [answer.lookups for answer in calibration.answers if answer.lookups is not None]
    context = median_low(tokens)
    timed = (_INTERLEAVED_WARM_UP + settings.repeats) * (1 + len(nodes) + len(trees))
    with steps(f"trees at context {context}", timed) as step:
        swept = sweep(engine, nodes, trees, sequences, context=context, repeats=settings.repeats, progress=step)
    stages = []
    for tree in (None, *trees):
        name = tree.name if tree else "plain step"
        with steps(f"profile of {name}", WARM_UP + settings.repeats) as step:
            stages.append(
                profile_passes(
                    settings.engine,
                    tree,
                    context=context,
                    passes=settings.repeats,
                    threads=settings.threads,
                    progress=step,
                )
            )
    with steps("answers", settings.answer_repeats * len(prompts) * (2 + len(trees) + len(others))) as step:
        answers = answer_all(
            engine,
            prompts,
            trees,
            others,
            max_new_tokens=settings.max_new_tokens,
            repeats=settings.answer_repeats,
            progress=step,
        )
    costs = None
    if facts is not None:
        with steps("memory and arithmetic", 2 * (1 + _RATE_REPEATS)) as step:
            rates = measure_rates(settings.threads, _RATE_REPEATS, progress=step)
        costs = count_costs(facts, rates, trees, stages, swept)
    return Results(
        settings=settings,
        manifest=engine.manifest.document(),
        machine=machine(),
        versions=versions(),
        load_seconds=load_seconds,
        trees=trees,
        contexts=at_contexts,
        sweep=swept,
        stages=stages,
        answers=answers,
        hits=hit_rates(sequences, engine.limits.topk, lookups, engine.limits.lookup),
        acceptance={tree.name: node_acceptance(tree, sequences) for tree in trees},
        costs=costs,
        notes=notes,
    )


def _open_others(settings: BenchSettings, engine: Engine) -> list[Any]:
    if settings.model is None:
        return []
    from medusa_engine.benchmarks.others import open_other  # loads torch

    names = dict.fromkeys(settings.against)
    return [open_other(name, settings.model, engine.manifest, threads=settings.threads) for name in names]


def _at_context(engine: Engine, trees: Sequence[Tree], tokens: int, repeats: int, steps: Steps) -> AtContext:
    passes = {"plain step": FixedContext(engine, tokens)}
    passes |= {tree.name: FixedContext(engine, tokens, tree) for tree in trees}
    prefills = max(3, repeats // 5)
    first = passes[trees[0].name]
    with steps(f"context {tokens}", 1 + prefills + (_INTERLEAVED_WARM_UP + repeats) * len(passes)) as step:
        prefill = interleaved({"prefill": first.prefill}, unit="ms", samples=prefills, warm_up=1, progress=step)
        for each in passes.values():
            each.rewind()
        cases = {name: each.sample for name, each in passes.items()}
        taken = interleaved(cases, unit="ms", samples=repeats, warm_up=_INTERLEAVED_WARM_UP, progress=step)
    step_samples, *rounds = taken.values()
    by_tree = {
        tree.name: Samples(f"{tree.name}, {counted(tree.nodes, 'row')}", "ms", samples.values)
        for tree, samples in zip(trees, rounds, strict=True)
    }
    return AtContext(tokens, prefill["prefill"], step_samples, by_tree)
