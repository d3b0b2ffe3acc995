"""How long each stage of a pass takes, from traces of ONNX Runtime's profiler on a session of its own."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import onnx
import onnxruntime as ort

from medusa_engine.benchmarks.passes import FixedContext
from medusa_engine.benchmarks.stages import STAGE_OF, STAGES, parts_of
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.manifest import graph_name
from medusa_engine.runtime.onnxruntime_backend import OnnxRuntimeBackend
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.tree import Tree

BETWEEN = "between nodes"  # what the library spends itself
WARM_UP = 2  # passes that are not kept

_KERNEL = "_kernel_time"


@dataclass(frozen=True)
class StageTimes:
    """Profiled passes of one kind.

    Attributes:
        name: of the tree, or `plain step`.
        rows: packed rows of a pass.
        context: committed cache rows before it.
        parts: part (`STAGE_OF`, and BETWEEN) -> milliseconds of each pass. They add up to the pass.
        passes: milliseconds of each pass as a whole.
    """

    name: str
    rows: int
    context: int
    parts: dict[str, tuple[float, ...]]
    passes: tuple[float, ...]

    @property
    def title(self) -> str:
        """Name and rows."""
        return f"{self.name}, {self.rows} row{'s' * (self.rows > 1)}"

    def stage(self, name: str) -> tuple[float, ...]:
        """Milliseconds of each pass in one of STAGES, or BETWEEN."""
        inside = [self.parts[part] for part, stage in {**STAGE_OF, BETWEEN: BETWEEN}.items() if stage == name]
        return tuple(map(sum, zip(*inside, strict=True)))

    def shares(self) -> dict[str, float]:
        """Of the passes' time, by stage and BETWEEN; 1 together."""
        whole = sum(self.passes)
        return {name: sum(self.stage(name)) / whole for name in (*STAGES, BETWEEN)}

    def part_median(self, name: str) -> float:
        """Milliseconds of a part in the median pass."""
        return median(self.parts[name])


def profile_passes(
    folder: Path,
    tree: Tree | None,
    *,
    context: int,
    passes: int,
    threads: int = 0,
    policy: AcceptancePolicy | None = None,
    progress: Callable[[], None] = lambda: None,
) -> StageTimes:
    """Profile passes of a bundle at one context.

    The library writes the graph that it runs, with its weights, into a temporary folder.

    Args:
        folder: of the bundle.
        tree: of the rounds; None for plain steps.
        policy: of acceptance; default: greedy.
        progress: called behind each pass.

    Raises:
        UserError: the bundle or the tree cannot be run.
    """
    policy = policy or AcceptancePolicy()
    with tempfile.TemporaryDirectory(prefix="medusa-bench-") as scratch:
        engine = Engine.open(folder, threads=threads, verify=False)
        backend = engine.backend
        assert isinstance(backend, OnnxRuntimeBackend)
        optimized = Path(scratch) / "optimized.onnx"
        _keep_traces(backend._options, optimized)
        at_context = FixedContext(engine, context, tree, policy)
        for _ in range(WARM_UP + passes):
            at_context.rewind()
            at_context.run()
            progress()
        session = backend.session(graph_name("step" if tree is None else "round", policy.graph))
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        parts = parts_of(onnx.load(optimized, load_external_data=False).graph)
    by_part, whole = _by_part(events, parts, passes)
    return StageTimes(tree.name if tree else "plain step", tree.nodes if tree else 1, context, by_part, whole)


def _keep_traces(options: ort.SessionOptions, optimized: Path) -> None:
    options.enable_profiling = True
    options.profile_file_prefix = str(optimized.with_name("trace"))
    options.optimized_model_filepath = str(optimized)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights.bin")


def _by_part(
    events: Sequence[dict[str, Any]], parts: dict[str, str], passes: int
) -> tuple[dict[str, tuple[float, ...]], tuple[float, ...]]:
    """Milliseconds by part and pass, and of the last `passes` runs as a whole; those before are prompt and warm-up."""
    runs: list[dict[str, float]] = []
    whole: list[float] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        name = event["name"]
        if name == "model_run":
            runs.append(dict.fromkeys(STAGE_OF, 0.0))
            whole.append(event["dur"] / 1000)
        elif name.endswith(_KERNEL) and event["args"]["op_name"] not in ("If", "Loop", "Scan"):  # their nodes count
            runs[-1][parts[name.removesuffix(_KERNEL)]] += event["dur"] / 1000
    kept = list(zip(runs[-passes:], whole[-passes:], strict=True))
    by_part = {part: tuple(run[part] for run, _ in kept) for part in STAGE_OF}
    by_part[BETWEEN] = tuple(total - sum(run.values()) for run, total in kept)
    return by_part, tuple(total for _, total in kept)
