"""Checkpoint against bundle against plan: the engine's own rounds, each judged by transformers on the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers

from medusa_engine.exporter import checkpoint
from medusa_engine.exporter.head_checkpoint import load_heads
from medusa_engine.exporter.heads import HeadWeights, MedusaHeads, untrained_heads
from medusa_engine.exporter.verify_compare import compare_pass
from medusa_engine.exporter.verify_difference import Compared, Difference
from medusa_engine.exporter.verify_passes import LogitsBackend, Pass, run_passes
from medusa_engine.exporter.verify_prompts import Prompt, read_prompts
from medusa_engine.exporter.verify_reference import Reference
from medusa_engine.exporter.verify_settings import VerifySettings, default_tolerance
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import Manifest, file_sha256
from medusa_engine.runtime.onnxruntime_backend import OnnxRuntimeBackend
from medusa_engine.runtime.tree import Tree, load_tree
from medusa_engine.runtime.tree_plan import TreePlan

Report = Callable[[str], None]


@dataclass
class Subject:
    """What one way of decoding did on all prompts.

    Attributes:
        name: `bundle, rounds`; `bundle, plain steps`; `plan, rounds`.
        path: of the engine.
        passes, rows: compared; rows are those that had logits.
        absolute, relative, cache: the largest errors, see `Compared`.
        errors: (prompt, round, relative error of the logits) of every pass.
        published: G of every round, by prompt.
        answers: tokens, by prompt.
        differences: (prompt, difference), in order; a prompt ends behind its first fault.
        draft_near_ties: drafts that are others at a near-tie.
    """

    name: str
    path: str
    passes: int = 0
    rows: int = 0
    absolute: float | None = None
    relative: float | None = None
    cache: float = 0.0
    errors: list[tuple[int, int, float]] = field(default_factory=list)
    published: list[list[int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    differences: list[tuple[int, Difference]] = field(default_factory=list)
    draft_near_ties: int = 0

    @property
    def faults(self) -> list[tuple[int, Difference]]:
        return [entry for entry in self.differences if entry[1].fault]

    @property
    def near_ties(self) -> list[tuple[int, Difference]]:
        return [entry for entry in self.differences if not entry[1].fault]

    def add(self, prompt: int, seen: Pass, compared: Compared) -> None:
        """Count one more pass."""
        self.passes += 1
        self.rows += compared.rows
        self.cache = max(self.cache, compared.cache)
        self.draft_near_ties += compared.draft_near_ties
        self.differences += [(prompt, difference) for difference in compared.differences]
        if compared.absolute is not None and compared.relative is not None:
            self.absolute = _larger(self.absolute, compared.absolute)
            self.relative = _larger(self.relative, compared.relative)
            self.errors.append((prompt, seen.number, compared.relative))
        if seen.number > 0:
            tokens = seen.published.tokens.tolist()
            self.published[-1].append(len(tokens))
            self.answers[-1] += tokens


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes:
        model, engine: what was compared, as the user named it.
        layers: of the decoder, which rounding errors add up over.
        dtype: of the engine's cache and of what it computes with.
        weights: of its weight matrices: the dtype, "int8" or "int4".
        tolerance: see `verify_compare.py`.
        drafts_compared: whether the heads, if there are any, were at hand; lookup always is.
        prompts: by number - 1.
        subjects: in the order in which they were compared.
        notes: what the user should know besides.
    """

    model: str
    engine: str
    layers: int
    dtype: str
    weights: str
    tolerance: float
    drafts_compared: bool
    prompts: Sequence[Prompt]
    subjects: Sequence[Subject]
    notes: Sequence[str]

    @property
    def fault(self) -> bool:
        return any(subject.faults for subject in self.subjects)

    @property
    def verdict(self) -> str:
        """`fault`, `near-ties` or `same`."""
        if self.fault:
            return "fault"
        return "near-ties" if any(subject.near_ties for subject in self.subjects) else "same"


def verify(settings: VerifySettings, report: Report) -> Verification:
    """Decode every prompt with the bundle's rounds, its plain steps and the plan's rounds, and judge each pass.

    The checkpoint follows the engine's tokens: behind a near-tie both go on from the same ones, and an answer without a
    difference is token for token the checkpoint's own greedy decoding.

    Args:
        report: called with lines about the progress.

    Raises:
        UserError: an input that cannot be read, or checkpoint, heads and engine that are not of one shape.
    """
    if settings.rounds < 1:
        raise UserError(f"--rounds is {settings.rounds}", "give 1 or more")
    if settings.plan and settings.plan.is_dir():
        raise UserError(f"{settings.plan}: a folder, not a plan", "give the file that medusa-build wrote")
    engine = Engine.open(settings.engine, threads=settings.threads)
    plan_engine = Engine.open(settings.plan, threads=settings.threads) if settings.plan else None
    tolerance = default_tolerance(engine.manifest.dtype) if settings.tolerance is None else settings.tolerance
    if not 0 < tolerance < 1:
        raise UserError(f"--tolerance is {tolerance}", "give a number between 0 and 1")
    trees = [load_tree(path) for path in settings.trees] or list(engine.trees)
    for tree in trees:
        TreePlan(tree, engine.limits)
    prompts = read_prompts(settings.prompts, engine, chat=settings.chat)

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    report(f"loading {settings.model}")
    source = checkpoint.find_source(settings.model)
    model = checkpoint.load_model(source)
    _check_shape(model, engine, source)
    heads = _heads(settings, source, engine, model)
    notes = _notes(engine.manifest, source, heads)
    medusa_heads = MedusaHeads(heads, model.get_output_embeddings()) if heads is not None and heads.heads else None
    reference = Reference(model, medusa_heads)

    subjects = []
    name = "bundle" if settings.engine.is_dir() else "plan"
    for opened, what, rounds in (
        (engine, f"{name}, rounds", True),
        (engine if name == "bundle" else None, f"{name}, plain steps", False),
        (plan_engine, "plan, rounds", True),
    ):
        if opened is not None:
            subject = Subject(what, str(settings.engine if opened is engine else settings.plan))
            _run(subject, opened, reference, prompts, trees if rounds else [], settings, tolerance, report)
            subjects.append(subject)
    return Verification(
        model=settings.model,
        engine=str(settings.engine),
        layers=reference.layers,
        dtype=engine.manifest.dtype,
        weights=engine.manifest.weights,
        tolerance=tolerance,
        drafts_compared=heads is not None,
        prompts=prompts,
        subjects=subjects,
        notes=notes,
    )


class _InTurn:
    """`Plans` that take one tree after the other, so that rounds follow those of other trees."""

    def __init__(self, plans: Sequence[TreePlan]) -> None:
        self._plans = plans
        self._next = 0

    @property
    def used(self) -> Tree:
        return self._plans[0].tree

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Nothing depends on it."""

    def choose(self) -> TreePlan:
        plan = self._plans[self._next % len(self._plans)]
        self._next += 1
        return plan

    def record(self, plan: TreePlan, token_ids: Sequence[int], seconds: float, *, whole: bool) -> None:
        """Nothing depends on it."""


def _run(
    subject: Subject,
    engine: Engine,
    reference: Reference,
    prompts: Sequence[Prompt],
    trees: Sequence[Tree],
    settings: VerifySettings,
    tolerance: float,
    report: Report,
) -> None:
    """Run all prompts with rounds of these trees; with none, with plain steps."""
    backend: Any = engine.backend
    if isinstance(backend, OnnxRuntimeBackend):
        backend = LogitsBackend(backend.folder, engine.manifest, threads=settings.threads)
    plans = [TreePlan(tree, engine.limits) for tree in trees]
    for number, prompt in enumerate(prompts, 1):
        subject.published.append([])
        subject.answers.append([])
        reference.start()
        reference.extend(prompt.ids)
        answer = subject.answers[-1]

        def observe(seen: Pass, number: int = number, prompt: Prompt = prompt, answer: list[int] = answer) -> bool:
            before = prompt.ids[:-1] if seen.number == 0 else [*prompt.ids, *answer]
            compared = compare_pass(seen, reference, engine.limits, before=before, tolerance=tolerance)
            subject.add(number, seen, compared)
            return not any(difference.fault for difference in compared.differences)

        run_passes(
            backend,
            engine.limits,
            prompt.ids,
            plan=_InTurn(plans) if plans else None,
            rounds=settings.rounds,
            observe=observe,
        )
        done = f"{counted(len(subject.published[-1]), 'round')}, {counted(len(answer), 'token')}"
        report(f"{subject.name}: prompt {number}/{len(prompts)}, {done}")


def _check_shape(model: Any, engine: Engine, source: checkpoint.Source) -> None:
    config, limits = model.config.get_text_config(), engine.limits
    for what, ours, theirs in (
        ("layers", config.num_hidden_layers, limits.layers),
        ("tokens in its vocabulary", config.vocab_size, limits.vocab_size),
    ):
        if ours != theirs:
            raise UserError(
                f"{source.path}: has {ours} {what}, but {engine.manifest.name} has {theirs}",
                "give the checkpoint that the engine was exported from",
            )


def _heads(settings: VerifySettings, source: checkpoint.Source, engine: Engine, model: Any) -> HeadWeights | None:
    """The engine's heads, if they are at hand.

    Raises:
        UserError: they cannot be read, or are of another number.
    """
    config = model.config.get_text_config()
    path = source.heads
    if settings.heads is not None:
        given = Path(settings.heads).expanduser()
        path = given if given.is_file() else checkpoint.find_folder(settings.heads, what="heads checkpoint")
    elif not engine.manifest.heads_trained:
        return untrained_heads(engine.limits.heads, config.hidden_size)
    if path is None:
        return None
    heads = load_heads(path, hidden=config.hidden_size, vocab_size=config.vocab_size)
    if heads.heads != engine.limits.heads:
        raise UserError(
            f"{path}: has {counted(heads.heads, 'head')}, but {engine.manifest.name} has {engine.limits.heads}",
            "give the heads that the engine was exported with",
        )
    return heads


def _notes(manifest: Manifest, source: checkpoint.Source, heads: HeadWeights | None) -> list[str]:
    notes = []
    files = {"checkpoint": (source.weight_files(), manifest.model.get("weights_sha256"))}
    if heads is None:
        notes.append("the drafts of the engine's heads are not compared: give them with --heads")
    elif heads.files:
        files["heads"] = (list(heads.files), manifest.heads.get("sha256"))
    for what, (paths, known) in files.items():
        hashes = sorted(file_sha256(path) for path in paths)
        if hashes != sorted((known or {}).values()):
            notes.append(f"the {what}'s files are not those that the engine was exported from: their sha256 differ")
    return notes


def _larger(one: float | None, other: float) -> float:
    """The larger; NaN is largest."""
    if one is None or other != other:
        return other
    return one if one != one else max(one, other)
