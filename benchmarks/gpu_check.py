"""The one check for a machine with an NVIDIA GPU: run it, and keep the JSON it writes.

    python benchmarks/gpu_check.py [--output benchmarks/results/gpu.json]

It takes whatever it finds and says what it did not: torch with CUDA for the first two parts, TensorRT or TensorRT-RTX
and cuda-bindings for the third.

1. the compaction kernel against its reference on the device, and its bytes over time against a large copy's
2. the traced round in torch at the shapes of 7B and 8B models, as one CUDA graph: milliseconds per plain step and per
   round, against the floor: bytes of weights and live cache over the copy's bandwidth
3. a plan of the demo model, built here, through the runtime: its answers against plain decoding, and the same times
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medusa_engine.benchmarks.gpu import kernel_check, plan_check, torch_round
from medusa_engine.runtime.tree import Tree, load_tree

CONTEXTS = (512, 2048)
NODES = (1, 4, 16, 32, 64)
AIMS = {"round / plain step": 1.22, "round / floor": 1.25}  # at 64 nodes
ROUNDS = 50
PACKAGES = (
    *("torch", "transformers", "triton", "cuda-bindings", "cupy-cuda13x"),
    *("tensorrt", "tensorrt-rtx-cu13", "onnxruntime-gpu"),
)
HOST_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"), help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=8, help="begin no further part behind; default: %(default)s")
    parser.add_argument(
        "--dry-run", action="store_true", help="the second part at a tiny shape on the CPU, to try the check itself"
    )
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device here", file=sys.stderr)
        print("gpu_check: run it where nvidia-smi lists a GPU, or give --dry-run to try the check", file=sys.stderr)
        return 1
    started = time.monotonic()
    report: dict[str, Any] = {"machine": machine(options.dry_run), "dry_run": options.dry_run}
    options.output.parent.mkdir(parents=True, exist_ok=True)

    def part(name: str, work: Callable[[], Any]) -> Any:
        minutes = (time.monotonic() - started) / 60
        if minutes > options.minutes:
            report[name] = {"not run": f"{options.minutes} minutes were over"}
        else:
            try:
                report[name] = work()
            except Exception as error:  # noqa: BLE001 - the other parts are worth having, and the report says so
                report[name] = {"failed": f"{type(error).__name__}: {error}"}
        report["minutes"] = (time.monotonic() - started) / 60
        options.output.write_text(json.dumps(report, indent=1) + "\n")  # after every part: what there is, is kept
        print(f"\n{name}\n{json.dumps(report[name], indent=1)}", flush=True)
        return report[name]

    compact = None
    if options.dry_run:
        bandwidth = 1e9
        part("round, tiny", lambda: rounds("tiny", None, bandwidth, contexts=(16,), nodes=(1, 4), device="cpu"))
    else:
        try:
            compact = kernel_check.Kernel()
            part("compaction kernel", lambda: kernel_check.check(compact))
            part("compute-sanitizer", sanitize)
        except RuntimeError as error:
            report["compaction kernel"] = {"not run": str(error)}
        large = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
        bandwidth = kernel_check.copy_bandwidth(large, torch.empty_like(large))
        del large
        report["copy_gb_per_s"] = bandwidth / 1e9
        torch_round.fuse()
        for shape in ("7b", "8b"):
            part(f"round, {shape}", lambda shape=shape: rounds(shape, compact, bandwidth))
            torch.cuda.empty_cache()
        part("plan", plan_check.check)
    print_table(report)
    print(f"\nwritten: {options.output}")
    return 1 if any(isinstance(value, dict) and "failed" in value for value in report.values()) else 0


def rounds(
    name: str,
    compact: kernel_check.Kernel | None,
    bandwidth: float,
    *,
    contexts: Sequence[int] = CONTEXTS,
    nodes: Sequence[int] = NODES,
    device: str = "cuda",
) -> dict[str, Any]:
    """Milliseconds of a plain step and of rounds of so many nodes, at each context.

    Args:
        bandwidth: bytes per second that the device copies.
    """
    dtype = torch.float16 if device == "cuda" else torch.float32
    model = torch_round.Model(torch_round.SHAPES[name], device, dtype, compact)
    found: dict[str, Any] = {
        "shape": model.shape.name,
        "compaction": "kernel" if compact else "torch operators",
        "backbone_gb": model.backbone_bytes / 1e9,
        "heads_gb": model.head_bytes / 1e9,
        "rows": [],
    }
    for context in contexts:
        for count in (None, *nodes):  # None: the plain step
            tree = tree_of(count or 1)
            rows = -(-(context + 2 * ROUNDS * (torch_round.HEADS + 1) + tree.nodes) // 64) * 64
            loop = torch_round.Loop(model, tree, context, rows, plain=count is None)
            measured = time_loop(loop, device)
            loop.close()
            weights = model.backbone_bytes + (0 if count is None else model.head_bytes)
            floor = (weights + model.cache_bytes(context)) / bandwidth * 2e3  # the copy's bandwidth counts both ways
            sizes = {"context": context, "nodes": count, "cache_rows": rows}
            found["rows"].append(sizes | {"floor_ms": floor} | measured)
    for row in found["rows"]:
        plain = next(r for r in found["rows"] if r["context"] == row["context"] and r["nodes"] is None)
        row["to_plain_step"] = row["ms"] / plain["ms"]
        row["to_floor"] = row["ms"] / row["floor_ms"]
    return found


def tree_of(nodes: int) -> Tree:
    """The first rows of a shipped tree of 64."""
    return load_tree(Path(__file__).parents[1] / "trees" / "64.json").shrunk(nodes)


def time_loop(loop: torch_round.Loop, device: str) -> dict[str, Any]:
    """Median, least and most milliseconds of a round, and what the host waited for inside the loop."""
    if device == "cpu":
        times = []
        for _ in range(3):
            started = time.perf_counter()
            loop.run()
            times.append((time.perf_counter() - started) * 1e3)
        return {"ms": float(np.median(times)), "ms_min": min(times), "ms_max": max(times), "host_waits": None}
    loop.capture()
    times = []
    for _ in range(5):
        loop.reset()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(ROUNDS):
            loop.run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / ROUNDS)
    return {"ms": float(np.median(times)), "ms_min": min(times), "ms_max": max(times), "host_waits": host_waits(loop)}


def host_waits(loop: torch_round.Loop) -> int:
    """Calls by which the host waited for the device while rounds were launched."""
    loop.reset()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile, torch.profiler.record_function("round_loop"):
        for _ in range(10):
            loop.run()
    events = profile.events()
    spans = [event.time_range for event in events if event.name == "round_loop"]
    return sum(
        event.name in HOST_WAITS and any(span.start <= event.time_range.start <= span.end for span in spans)
        for event in events
    )


def sanitize() -> dict[str, Any]:
    """The kernel's cases under compute-sanitizer, in a process of their own."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"not run": "compute-sanitizer is not on the PATH"}
    program = "from medusa_engine.benchmarks.gpu import kernel_check as k\nimport numpy as np\n"
    program += "c = k.Kernel(); r = np.random.default_rng(1)\n"
    program += "for _ in range(5): k._compare(c, r)"
    found = {}
    for kind in ("memcheck", "racecheck"):
        command = [tool, "--tool", kind, "--error-exitcode", "9", sys.executable, "-c", program]
        place = Path(__file__).parent
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=place, check=False)
        lines = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line]
        found[kind] = {"exit": done.returncode, "summary": lines[-1:] or done.stdout.splitlines()[-2:]}
    return found


def machine(dry_run: bool) -> dict[str, Any]:
    """What ran it."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    facts: dict[str, Any] = {"python": platform.python_version(), "packages": versions}
    if not dry_run:
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_gb": properties.total_memory / 1e9,
            "cuda": torch.version.cuda,
        }
    return facts


def print_table(report: dict[str, Any]) -> None:
    """The rounds of every shape, the plain step first."""
    for name, part in report.items():
        if not isinstance(part, dict) or "rows" not in part:
            continue
        print(f"\n{part.get('shape', name)}, compaction by {part.get('compaction', 'the plan')}")
        print(f"{'context':>8}{'nodes':>7}{'ms':>9}{'/ plain':>9}{'/ floor':>9}  host waits")
        for row in part["rows"]:
            nodes = "plain" if row["nodes"] is None else row["nodes"]
            print(
                f"{row['context']:>8}{nodes:>7}{row['ms']:>9.3f}{row['to_plain_step']:>9.3f}{row['to_floor']:>9.3f}"
                f"  {row['host_waits']}"
            )
    print("aims at 64 nodes: " + ", ".join(f"{what} <= {aim}" for what, aim in AIMS.items()))


if __name__ == "__main__":
    sys.exit(main())
