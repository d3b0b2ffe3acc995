"""`medusa-export`: turn a checkpoint and its Medusa heads into a bundle."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from medusa_engine.exporter.settings import DEFAULT_LOOKUP, DEFAULT_MAX_LENGTH, PRECISIONS, ExportSettings
from medusa_engine.runtime.command_line import add_version, run_command
from medusa_engine.runtime.manifest import TARGET_DTYPES
from medusa_engine.runtime.policy import POLICIES, TYPICAL_NOTE
from medusa_engine.runtime.tree import MOST_LOOKUP


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="medusa-export",
        description="Export a model with Medusa heads as a bundle that runs on ONNX Runtime without torch, or that"
        " medusa-build makes a TensorRT plan of.",
    )
    parser.add_argument(
        "--model", required=True, help="Hugging Face folder, hub id or .gguf file; a Medusa repository names its base"
    )
    parser.add_argument("--heads", help="heads: folder, hub id or file; not needed if the model brings its own")
    parser.add_argument(
        "--untrained-heads",
        type=int,
        metavar="K",
        help="K zero-initialised heads with the shared projection, for a model without heads",
    )
    parser.add_argument(
        "--tree",
        required=True,
        action="append",
        type=Path,
        dest="trees",
        metavar="TREE",
        help="tree file, or the name of a shipped tree; given again, answers change between the trees to the fastest,"
        " beginning with the first; others can be given at run time",
    )
    parser.add_argument("-o", "--output", type=Path, help="bundle folder; default: engines/MODEL")
    parser.add_argument(
        "--max-length", type=int, help=f"tokens of prompt and answer; default: at most {DEFAULT_MAX_LENGTH}"
    )
    parser.add_argument(
        "--max-tree-nodes",
        type=int,
        default=ExportSettings.max_tree_nodes,
        help="nodes of the largest tree, root included; default: %(default)s",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        dest="topk",
        default=ExportSettings.topk,
        help="ranks each head offers; default: %(default)s",
    )
    parser.add_argument(
        "--no-heads",
        action="store_true",
        help="export any model without heads: the context alone proposes, and trees have lookup nodes only",
    )
    lookup = parser.add_mutually_exclusive_group()
    lookup.add_argument(
        "--lookup-depth",
        type=int,
        metavar="N",
        help=f"lookup nodes that trees may have, at most {MOST_LOOKUP}: the tokens that followed where the end of the"
        " context occurred before; default: as many as heads,"
        f" {DEFAULT_LOOKUP} without",
    )
    lookup.add_argument("--no-lookup", action="store_false", dest="lookup", help="leave lookup out of the graphs")
    parser.add_argument(
        "--acceptance",
        type=_names,
        default=ExportSettings.acceptance,
        metavar="POLICY,...",
        help=f"acceptance policies for medusa-run to choose from: {','.join(POLICIES)}; greedy is always there, sample"
        f" and rejection keep the model's distribution, typical {TYPICAL_NOTE}; default:"
        f" {','.join(ExportSettings.acceptance)}",
    )
    parser.add_argument(
        "--repetition-penalty",
        action="store_true",
        help="also write the graphs for medusa-run --repetition-penalty: they share the weights, and without it cost"
        " nothing",
    )
    parser.add_argument(
        "--target",
        choices=tuple(TARGET_DTYPES),
        default=ExportSettings.target,
        help="what will run the graphs: onnxruntime as they are, tensorrt once medusa-build made a plan of them;"
        " default: %(default)s",
    )
    parser.add_argument(
        "--precision",
        choices=tuple(PRECISIONS),
        help="for onnxruntime fp32 (the default), int8 or int4: weight matrices of so many bits, faster, and exact"
        " against plain decoding with the same weights; for tensorrt fp16 (the default) or bf16",
    )
    parser.add_argument("--force", action="store_true", help="replace a bundle that exists")
    add_version(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_command(build_parser(), _run, arguments, extra="export")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _run(options: argparse.Namespace) -> None:
    if options.model.endswith(".gguf"):
        # transformers' progress bar for the tensors of such a file can be switched off in this way only, at import.
        os.environ.setdefault("TQDM_DISABLE", "1")
    from medusa_engine.exporter.export import export

    target = export(ExportSettings(**vars(options)))
    print(target)


if __name__ == "__main__":
    sys.exit(main())
