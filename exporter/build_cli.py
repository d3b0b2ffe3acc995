"""`medusa-build`: turn a bundle into a TensorRT plan."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_engine.exporter.build_settings import MOST_PREFILL_CHUNK, BuildSettings
from medusa_engine.runtime.command_line import add_version, run_command
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.plan import ACCEPTANCES, FLAVORS

if TYPE_CHECKING:
    from medusa_engine.exporter.engine import BuildReport

_MEGABYTE = 1e6


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="medusa-build",
        description="Build a plan for NVIDIA GPUs out of a bundle that medusa-export --target tensorrt wrote.",
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="bundle folder, engines/NAME")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="NAME.plan",
        help="the plan; NAME.plan.json and NAME.plan.files come beside it; default: BUNDLE.plan",
    )
    parser.add_argument(
        "--flavor",
        choices=FLAVORS,
        help="library: the full one, or the one for RTX GPUs, which builds without a GPU; default: whichever is"
        " installed, the full one first",
    )
    parser.add_argument(
        "--compute-capability", metavar="X.Y", help="of the GPUs the plan is for, as 8.9; default: that of the GPU here"
    )
    parser.add_argument(
        "--acceptance",
        choices=ACCEPTANCES,
        default=BuildSettings.acceptance,
        help="policy of the plan; at temperature 0 a plan for sample is greedy; default: %(default)s",
    )
    parser.add_argument(
        "--max-prefill-chunk",
        type=int,
        default=BuildSettings.max_prefill_chunk,
        metavar="ROWS",
        help=f"prompt tokens of a pass, 1 to {MOST_PREFILL_CHUNK}; default: %(default)s, or max_length if that is less",
    )
    parser.add_argument(
        "--workspace-mib", type=int, metavar="MIB", help="scratch memory of a kernel; default: the library's own limit"
    )
    parser.add_argument(
        "--timing-cache",
        type=Path,
        metavar="FILE",
        help="kernel timings, read if the file is there and written after the build (flavor tensorrt)",
    )
    parser.add_argument(
        "--version-compatible",
        action="store_true",
        help="a plan that later versions of the library run, too, and tensorrt_lean (flavor tensorrt)",
    )
    parser.add_argument(
        "--no-plugin",
        action="store_false",
        dest="plugin",
        help="compact the cache with standard operators, not with the plugin (tensorrt-rtx has no plugins)",
    )
    parser.add_argument("--verbose", action="store_true", help="print all that the library says")
    parser.add_argument("--force", action="store_true", help="replace a plan that exists")
    add_version(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_command(build_parser(), _run, arguments)


def _run(options: argparse.Namespace) -> None:
    from medusa_engine.exporter.engine import build

    report = build(BuildSettings(**vars(options)))
    for note in report.notes:
        print(f"note: {note}", file=sys.stderr)
    print(report.path)
    for label, value in _lines(report):
        print(f"{label:<18} {value}")


def _lines(report: BuildReport) -> list[tuple[str, str]]:
    plan = report.plan
    decode, prefill = plan.profiles
    none = "" if report.has_plugins else f" ({plan.flavor} has no plugins)"
    compaction = "plugin" if plan.compaction == "plugin" else f"function body{none}"
    return [
        ("library", f"{report.library}, compute capability {plan.compute_capability}"),
        ("graph", f"{plan.graph}, {plan.bundle.dtype}, {plan.acceptance}"),
        ("profiles", f"{decode.name}: {counted(decode.rows[0], 'row')}; {prefill.name}: 1 to {prefill.rows[2]} rows"),
        ("compaction", compaction),
        ("attention", str(plan.builder["attention"])),
        ("parse", f"{report.parse_seconds:.1f} s"),
        ("build", f"{report.build_seconds:.1f} s"),
        ("plan", f"{plan.plan['bytes'] / _MEGABYTE:.0f} MB"),
        ("peak memory", f"{report.peak_bytes / _MEGABYTE:.0f} MB"),
        ("self-test", report.self_test),
    ]


if __name__ == "__main__":
    sys.exit(main())
