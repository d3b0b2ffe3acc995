"""What `medusa-bench` is asked to do, and the sizes that fit the engine at hand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.tree import Tree, load_tree

if TYPE_CHECKING:  # what loads ONNX Runtime is imported where it is needed
    from medusa_engine.runtime.engine import Engine

CONTEXTS = (64, 256, 1024)
TRANSFORMERS, LLAMA_CPP = OTHERS = ("transformers", "llama-cpp")  # runtimes for --against
SWEEP = (1, 2, 4, 8, 16, 32, 64)
MOST_ANSWER_REPEATS = 99


@dataclass(frozen=True)
class BenchSettings:
    """Options of `medusa-bench`.

    Attributes:
        engine: bundle folder.
        contexts: tokens in the cache while passes are timed; None for those of CONTEXTS that fit.
        sweep: nodes of the trees to grow; None for those of SWEEP that the engine runs.
        trees: measured beside the bundle's own.
        prompts: file, see `prompt_file.py`; None for our own.
        max_new_tokens: of each answer.
        answer_repeats: answers to each prompt in each way.
        against: names of other runtimes.
        model: their checkpoint.
        ledger: count costs, and draw the roofline.
        repeats: samples of each timed pass.
        threads: of every runtime; one for each CPU that this process may use.
    """

    engine: Path
    contexts: tuple[int, ...] | None = None
    sweep: tuple[int, ...] | None = None
    trees: tuple[Path, ...] = ()
    prompts: Path | None = None
    max_new_tokens: int = 64
    answer_repeats: int = 1
    against: tuple[str, ...] = ()
    model: str | None = None
    ledger: bool = False
    repeats: int = 25
    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))


def check_settings(settings: BenchSettings) -> None:
    """Refuse what no engine could do.

    Raises:
        UserError: names the option.
    """
    from medusa_engine.runtime.engine import MOST_THREADS

    for option, value, least in (
        ("--max-new-tokens", settings.max_new_tokens, 2),
        ("--repeats", settings.repeats, 1),
        ("--threads", settings.threads, 1),
    ):
        if value < least:
            raise UserError(f"{option} is {value}", f"give {least} or more")
    if not 1 <= settings.answer_repeats <= MOST_ANSWER_REPEATS:
        raise UserError(f"--answer-repeats is {settings.answer_repeats}", f"give 1 to {MOST_ANSWER_REPEATS}")
    if settings.threads > MOST_THREADS:
        raise UserError(f"--threads is {settings.threads}", f"give 1 to {MOST_THREADS}")
    if settings.against and settings.model is None:
        raise UserError("--against needs the checkpoint", "give --model, what the bundle was exported from")
    if settings.model is not None and not settings.against:
        raise UserError("--model is for --against", "leave it out, or add --against transformers")


def named_trees(settings: BenchSettings, engine: Engine) -> list[Tree]:
    """The bundle's trees and those that were asked for, each once, under names of their own.

    Raises:
        UserError: a file is no tree, or the engine cannot run it.
    """
    from medusa_engine.runtime.tree_plan import TreePlan

    found: list[Tree] = []
    for tree in (*engine.trees, *map(load_tree, settings.trees)):
        TreePlan(tree, engine.limits)  # refuses what the engine cannot run
        if tree.paths in [known.paths for known in found]:
            continue
        same = sum(known.name == tree.name for known in found)
        found.append(tree if not same else Tree(tree.paths, f"{tree.name} ({1 + same})"))
    return found


def sweep_nodes(settings: BenchSettings, engine: Engine) -> tuple[int, ...]:
    """Nodes of the trees to grow.

    Raises:
        UserError: the engine runs no tree of so many nodes.
    """
    from medusa_engine.benchmarks.sweep import most_nodes
    from medusa_engine.training.round_timing import largest_tree

    most = most_nodes(engine.limits)
    if settings.sweep is None:
        return tuple(count for count in SWEEP if count <= min(most, largest_tree(engine.limits)))
    for count in settings.sweep:
        if not 1 <= count <= most:
            raise UserError(
                f"--sweep {count}: trees of this engine have 1 to {most} nodes",
                "give smaller ones, or export with a larger --max-tree-nodes, --top-k or --lookup-depth",
            )
    return tuple(dict.fromkeys(settings.sweep))


def contexts(settings: BenchSettings, engine: Engine, largest: int) -> tuple[int, ...]:
    """Contexts behind which the largest tree still fits into the cache.

    Raises:
        UserError: one that was asked for does not leave that room.
    """
    room = engine.limits.max_length - largest
    if room < 1:
        raise UserError(
            f"a tree of {counted(largest, 'node')} leaves no room in a cache of"
            f" {counted(engine.limits.max_length, 'token')}",
            "measure smaller trees (--sweep), or export with a larger medusa-export --max-length",
        )
    if settings.contexts is None:
        return tuple(tokens for tokens in CONTEXTS if tokens <= room) or (max(1, room // 2),)
    for tokens in settings.contexts:
        if not 1 <= tokens <= room:
            raise UserError(
                f"--context {tokens}: 1 to {room} leave room for {counted(largest, 'row')} in a cache of"
                f" {counted(engine.limits.max_length, 'token')}",
                "give shorter ones, or export with a larger medusa-export --max-length",
            )
    return tuple(dict.fromkeys(settings.contexts))


def left_out(chosen: Sequence[int], wanted: Sequence[int], what: str) -> list[str]:
    """A note on defaults that do not fit the engine."""
    missing = [str(value) for value in wanted if value not in chosen]
    return [f"{what} {', '.join(missing)}: left out, the engine is too small for it"] if missing else []
