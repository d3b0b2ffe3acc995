"""What the demo engine takes besides its passes: memory, the loop around them, a long static cache.

Every figure is printed with its baseline, measured in the same run. The bars are judged, but the exit status is 0
either way: times on a shared machine are for people to read.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from medusa_engine.benchmarks.measure import Report, Samples, interleaved, ratio_of
from medusa_engine.benchmarks.passes import FixedContext, context_ids, host_overhead
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.manifest import WEIGHTS_NAME, read_manifest
from medusa_engine.runtime.tree import load_tree

ROOT = Path(__file__).resolve().parents[1]
CONTEXT = 256  # tokens in the cache
MEMORY_RUNS = 5
MEMORY_TOKENS = 64
LONG_CACHE = 8192
CACHE_BAR = 1.1
HOST_BAR = 0.03
MEMORY_BAR = 2.2


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, default=ROOT / "engines/smollm2-135m", help="bundle folder")
    parser.add_argument(
        "--model",
        type=Path,
        default=ROOT / "engines/models/SmolLM2-135M-Instruct.Q4_1.gguf",
        help="the checkpoint that --engine was exported from: folder or .gguf file",
    )
    parser.add_argument(
        "--heads",
        default=str(ROOT / "heads/smollm2-135m-instruct"),
        help="the heads that --engine was exported with; default: the demo model's",
    )
    parser.add_argument("--bundle-8192", type=Path, help="the same export with --max-length 8192; default: made anew")
    parser.add_argument("--samples", type=int, default=25, help="per measurement; default: %(default)s")
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="default: one for each CPU that this process may use",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and all samples")
    return parser


def main() -> int:
    options = build_parser().parse_args()
    report = Report()
    # First, while this process is small: what a process weighs counts for the children it starts.
    measure_memory(report, options)
    engine = Engine.open(options.engine, threads=options.threads)
    measure_host(report, engine, options)
    if options.bundle_8192:
        measure_cache_length(report, engine, options.bundle_8192, options)
    else:
        with tempfile.TemporaryDirectory() as folder:
            measure_cache_length(report, engine, export_8192(engine, Path(folder), options), options)
    if options.json:
        chosen = {name: None if value is None else str(value) for name, value in vars(options).items()}
        report.save(options.json, options=chosen, manifest=engine.manifest.document())
    return 0


def measure_memory(report: Report, options: argparse.Namespace) -> None:
    weights = (options.engine / WEIGHTS_NAME).stat().st_size
    limits = read_manifest(options.engine).limits
    prompt = ",".join(str(token) for token in context_ids(limits.vocab_size, CONTEXT))
    command = [sys.executable, "-m", "medusa_engine.runtime.cli", "--engine", str(options.engine), "--json"]
    command += ["--prompt-ids", prompt, "--max-new-tokens", str(MEMORY_TOKENS), "--ignore-eos"]
    command += ["--threads", str(options.threads)]
    cases = {
        "medusa-run": lambda: peak_bytes(command) / 1e6,
        "medusa-run --no-speculation": lambda: peak_bytes([*command, "--no-speculation"]) / 1e6,
    }
    taken = interleaved(cases, unit="MB", samples=MEMORY_RUNS, warm_up=0)
    file = Samples(f"weights file {WEIGHTS_NAME}", "MB", (weights / 1e6,) * MEMORY_RUNS)
    report.section(f"peak memory of medusa-run, {CONTEXT} + {MEMORY_TOKENS} tokens", [file, *taken.values()])
    for name, peaks in taken.items():
        report.bar(ratio_of(f"{name} / weights file", peaks, file), MEMORY_BAR)


def peak_bytes(command: list[str]) -> int:
    """Largest resident size of one run of a command."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)}: exit status {process.returncode}")
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert usage.ru_maxrss > own, "a child starts with its parent's peak: measure before this process grows"
    return 1024 * usage.ru_maxrss


def measure_host(report: Report, engine: Engine, options: argparse.Namespace) -> None:
    passes = 4 * options.samples
    step_outside, step_inside = host_overhead(engine, context=CONTEXT, passes=passes, speculation=False)
    round_outside, round_inside = host_overhead(engine, context=CONTEXT, passes=passes, speculation=True)
    steps = Samples("plain step", "ms", tuple(map(sum, zip(step_outside, step_inside, strict=True))))
    rounds = Samples(f"{engine.tree.nodes}-row round, engine call", "ms", tuple(round_inside))
    outside = {
        "outside the engine call, per step": tuple(step_outside),
        "outside the engine call, per round": tuple(round_outside),
    }
    measured = [Samples(name, "ms", values) for name, values in outside.items()]
    report.section(f"host overhead of the loop from context {CONTEXT}", [steps, rounds, *measured])
    for samples in measured:
        share = tuple(value / steps.median for value in samples.values)
        report.bar(Samples(f"{samples.name} / plain step", "x", share), HOST_BAR, strict=True)


def export_8192(engine: Engine, folder: Path, options: argparse.Namespace) -> Path:
    limits = engine.limits
    bundle = folder / "bundle"
    heads = ["--heads", options.heads]
    command = [sys.executable, "-m", "medusa_engine.exporter.cli", "--model", str(options.model), *heads]
    command += ["--tree", str(ROOT / "trees/8.json"), "--output", str(bundle), "--max-length", str(LONG_CACHE)]
    command += ["--top-k", str(limits.topk), "--max-tree-nodes", str(limits.max_tree_nodes)]
    print(f"\nexporting with --max-length {LONG_CACHE} for the next figure", flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return bundle


def measure_cache_length(report: Report, engine: Engine, bundle: Path, options: argparse.Namespace) -> None:
    long = Engine.open(bundle, threads=options.threads)
    short_rows, long_rows = engine.limits.max_length, long.limits.max_length
    tree = load_tree(Path("8"))
    cases: dict[str, Callable[[], float]] = {}
    for kind, path in (("plain step", None), ("8-row round", tree)):
        cases[f"{kind}, S_max {short_rows}"] = FixedContext(engine, CONTEXT, path).sample
        cases[f"{kind}, S_max {long_rows}"] = FixedContext(long, CONTEXT, path).sample
    taken = interleaved(cases, unit="ms", samples=options.samples)
    report.section(
        f"static cache of {short_rows} and {long_rows} rows, both at context {CONTEXT}", list(taken.values())
    )
    for kind in ("plain step", "8-row round"):
        short, longer = taken[f"{kind}, S_max {short_rows}"], taken[f"{kind}, S_max {long_rows}"]
        report.bar(ratio_of(f"{kind}, S_max {long_rows} / {short_rows}", longer, short), CACHE_BAR)


if __name__ == "__main__":
    sys.exit(main())
