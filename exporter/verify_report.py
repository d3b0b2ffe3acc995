"""What `medusa-verify` found, as text and as a JSON object."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from medusa_engine.exporter.verify import Subject, Verification
from medusa_engine.exporter.verify_difference import Difference
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.manifest import number_formats

TOOLS = ("medusa-engine", "onnxruntime", "torch", "transformers")


def document(found: Verification) -> dict[str, Any]:
    """The JSON form; numbers that are not finite are null.

    `first_divergence` of a subject is the first fault, else the first near-tie, else null.
    """
    subjects = []
    for subject in found.subjects:
        rounds = [count for counts in subject.published for count in counts]
        subjects.append(
            {
                "name": subject.name,
                "engine": subject.path,
                "verdict": verdict_of(subject),
                "passes": subject.passes,
                "rows": subject.rows,
                "rounds": len(rounds),
                "tokens": sum(rounds),
                "published_per_round": dict(sorted(Counter(rounds).items())),
                "logits_max_error": subject.absolute,
                "logits_relative_error": subject.relative,
                "logits_relative_error_per_layer": per_layer(found, subject),
                "cache_relative_error": subject.cache,
                "near_ties": len(subject.near_ties),
                "draft_near_ties": subject.draft_near_ties if found.drafts_compared else None,
                "faults": len(subject.faults),
                "first_divergence": _first_document(subject),
                "answers": subject.answers,
            }
        )
    return _finite(
        {
            "verdict": found.verdict,
            "model": found.model,
            "engine": found.engine,
            "layers": found.layers,
            "dtype": found.dtype,
            "weights": found.weights,
            "tolerance": found.tolerance,
            "prompts": [{"name": prompt.name, "tokens": len(prompt.ids)} for prompt in found.prompts],
            "subjects": subjects,
            "notes": list(found.notes),
            "versions": versions(),
        }
    )


def text(found: Verification) -> str:
    """A few lines for each subject; of a divergence, where it is and what both say."""
    lines = [
        f"checkpoint   {found.model}: {counted(found.layers, 'layer')}",
        f"engine       {found.engine}: {number_formats(found.weights, found.dtype)}",
        f"tolerance    {found.tolerance:.0e} of a row's largest logit",
    ]
    for subject in found.subjects:
        lines += ["", f"{subject.name}: {headline(found, subject)}"]
        lines += [f"  {name:11}{value}" for name, value in figures(found, subject).items()]
        if (first := first_divergence(subject)) is not None:
            lines += [f"  {name:11}{value}" for name, value in explained(found, *first).items()]
    return "\n".join(lines)


def verdict_of(subject: Subject) -> str:
    """`fault`, `near-ties` or `same`."""
    return "fault" if subject.faults else "near-ties" if subject.near_ties else "same"


def headline(found: Verification, subject: Subject) -> str:
    """How much was compared, and how it ended."""
    ends = {
        "fault": f"FAULT on {len(subject.faults)} of the prompts",
        "near-ties": f"the same up to {counted(len(subject.near_ties), 'near-tie')}",
        "same": "the same, token for token",
    }
    rounds = sum(map(len, subject.published))
    return f"{counted(len(found.prompts), 'prompt')}, {counted(rounds, 'round')}; {ends[verdict_of(subject)]}"


def figures(found: Verification, subject: Subject) -> dict[str, str]:
    """Errors and counts by name."""
    rounds = [count for counts in subject.published for count in counts]
    named = {"logits": "not given by this engine: its choices are compared"}
    if subject.absolute is not None and subject.relative is not None:
        named["logits"] = (
            f"{counted(subject.rows, 'row')}, largest error {subject.absolute:.1e}, relative {subject.relative:.1e}:"
            f" {per_layer(found, subject):.1e} for each of {counted(found.layers, 'layer')}"
        )
    named["cache"] = f"largest relative error {subject.cache:.1e}"
    if rounds:
        counts = ", ".join(f"{many} x {count}" for count, many in sorted(Counter(rounds).items()))
        named["tokens"] = f"{sum(rounds)}, {sum(rounds) / len(rounds):.2f} per round ({counts})"
    if found.drafts_compared and subject.draft_near_ties:
        named["drafts"] = (
            f"others at {counted(subject.draft_near_ties, 'near-tie')} of the heads, which no answer depends on"
        )
    return named


def first_divergence(subject: Subject) -> tuple[int, Difference] | None:
    """The first fault, else the first near-tie, with its prompt."""
    return next(iter(subject.faults or subject.near_ties), None)


def explained(found: Verification, prompt: int, difference: Difference) -> dict[str, str]:
    """Where the two part and what both say there, by name."""
    where = "its prompt" if difference.round == 0 else f"round {difference.round}"
    kind = "fault" if difference.fault else "near-tie"
    named = {
        kind: f"{difference.kind}: prompt {prompt} ({shortened(found.prompts[prompt - 1].name)}), {where},"
        f" row {difference.row}, path {list(difference.path)}, position {difference.position}",
        "because": difference.reason,
    }
    if difference.reference_logits is not None:
        tokens = f"tokens {difference.engine_token} and {difference.reference_token}"
        theirs = "{:.5f} and {:.5f}".format(*difference.reference_logits)
        ours = (
            "not given" if difference.engine_logits is None else "{:.5f} and {:.5f}".format(*difference.engine_logits)
        )
        named["both"] = f"{tokens}: checkpoint {theirs}, engine {ours}"
        named["margin"] = f"{difference.margin:.2e}; a near-tie is at most {difference.near_tie_margin:.2e}"
    return named


def per_layer(found: Verification, subject: Subject) -> float | None:
    """Relative error over the number of layers: rounding adds up over them, so models of any depth compare."""
    return None if subject.relative is None else subject.relative / found.layers


def versions() -> dict[str, str]:
    """Of the packages that computed."""
    return {tool: version(tool) for tool in TOOLS}


def shortened(name: str, most: int = 40) -> str:
    return name if len(name) <= most else name[: most - 3] + "..."


def _first_document(subject: Subject) -> dict[str, Any] | None:
    first = first_divergence(subject)
    return None if first is None else {"prompt": first[0], **asdict(first[1])}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(entry) for entry in value]
    return value
