"""`medusa-heads`: look into a heads checkpoint, or write it in another layout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_engine.runtime.command_line import add_version, run_command
from medusa_engine.runtime.errors import UserError

if TYPE_CHECKING:
    from medusa_engine.exporter.head_checkpoint import HeadCheckpoint

FORMAT_NAMES = ("original", "medusa-2", "vllm", "tensorrt-llm", "modelopt")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="medusa-heads", description="Look into Medusa head checkpoints and convert them."
    )
    add_version(parser)
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="say what a heads checkpoint holds and what is odd about it")
    inspect.add_argument("heads", type=Path, help="file, or folder that holds one")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    convert = commands.add_parser("convert", help="write the heads in another layout, as safetensors")
    convert.add_argument("heads", type=Path, help="file, or folder that holds one, in any known layout")
    convert.add_argument("--to", required=True, choices=FORMAT_NAMES, help="layout to write")
    convert.add_argument("-o", "--output", required=True, type=Path, help="the .safetensors file to write")
    convert.add_argument(
        "--base", type=Path, help="folder of the base model, for heads out of a whole model: it has to be the same one"
    )
    convert.add_argument("--force", action="store_true", help="replace a file that exists")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_command(build_parser(), _run, arguments, extra="export")


def _run(options: argparse.Namespace) -> None:
    from medusa_engine.exporter.backbone import check_backbone
    from medusa_engine.exporter.head_checkpoint import read_checkpoint, write_checkpoint
    from medusa_engine.exporter.head_formats import FORMATS
    from medusa_engine.exporter.weight_files import weight_files

    if options.command == "inspect":
        checkpoint = read_checkpoint(options.heads)
        facts = _facts(checkpoint)
        if options.json:
            print(json.dumps({**facts, "notes": list(checkpoint.notes)}))
            return
        for name, value in facts.items():
            print(f"{name:18} {'none' if value is None else value}")
        for note in checkpoint.notes:
            print(f"{'note':18} {note}")
        return
    if options.output.suffix != ".safetensors":
        raise UserError(f"{options.output}: not a .safetensors name", "heads are written as safetensors only")
    if options.output.exists() and not options.force:
        raise UserError(f"{options.output}: the file exists already", "give --force to replace it, or another --output")
    if not options.output.absolute().parent.is_dir():
        raise UserError(f"{options.output}: its folder does not exist", "make the folder, or give another --output")
    checkpoint = read_checkpoint(options.heads)
    check_backbone(checkpoint.weights, weight_files(options.base) if options.base else [])
    write_checkpoint(checkpoint, FORMATS[options.to], options.output)
    print(options.output)


def _facts(checkpoint: HeadCheckpoint) -> dict[str, str | int | None]:
    weights = checkpoint.weights
    shared = weights.projection is None
    projection = "shared with the base model" if shared else "own"
    if weights.projection is not None and len(weights.projection) == 1 and weights.heads > 1:
        projection = "own, one for all heads"
    return {
        "format": checkpoint.format.name,
        "heads": weights.heads,
        "residual layers": weights.layers,
        "hidden": weights.hidden,
        "vocabulary": None if weights.projection is None else weights.projection.shape[1],
        "draft vocabulary": None if weights.token_map is None else len(weights.token_map),
        "projection": projection,
        "dtype": checkpoint.dtype,
        "biases": "yes" if checkpoint.biases else "no",
        "base": checkpoint.base,
        "checksum": checkpoint.checksum,
    }


if __name__ == "__main__":
    sys.exit(main())
