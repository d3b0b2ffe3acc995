"""`medusa-train`: train Medusa heads, alone or together with an adapter of the backbone."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from medusa_engine.runtime.command_line import add_version, run_command
from medusa_engine.runtime.errors import UserError
from medusa_engine.training import medusa2_cli
from medusa_engine.training.device import DTYPES


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="medusa-train",
        description="Train Medusa heads on data of medusa-distill; goes on where it was interrupted.",
    )
    add_version(parser)
    parser.add_argument("--model", required=True, help="the backbone: Hugging Face folder, hub id or .gguf file")
    parser.add_argument("--data", required=True, type=Path, nargs="+", help="data folders written by medusa-distill")
    parser.add_argument("-o", "--output", required=True, type=Path, help="folder of the heads")
    parser.add_argument("--heads", type=int, help="K; default: 4")
    parser.add_argument("--layers", type=int, help="residual blocks per head; default: 1")
    parser.add_argument("--epochs", type=int, help="at most this many passes over the data; default: 4")
    parser.add_argument("--batch", type=int, help="positions per optimiser step; default: 2048")
    parser.add_argument("--accumulate", type=int, help="forward passes a batch is split into; default: 1")
    parser.add_argument("--learning-rate", type=float, help="default: 0.002")
    parser.add_argument("--weight-decay", type=float, help="default: 0.01")
    parser.add_argument("--seed", type=int, help="default: 0")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of matrix products; default: bfloat16 where the device is fast in it, else float32",
    )
    group = parser.add_argument_group("medusa-1")
    group.add_argument(
        "--own-projection",
        action="store_true",
        default=None,
        help="each head trains an LM projection of its own; default: shared",
    )
    group.add_argument(
        "--no-bias",
        action="store_false",
        dest="biases",
        default=None,
        help="residual blocks without biases; default: with",
    )
    group.add_argument(
        "--train-on-inputs",
        action="store_true",
        default=None,
        help="train on all tokens of the conversations; default: on those the assistant wrote",
    )
    group.add_argument("--soft", type=float, help="share of the target's distribution in the loss; default: 1")
    group.add_argument("--draft-vocabulary", type=int, metavar="N", help="heads choose from the N most frequent tokens")
    group.add_argument("--init", type=Path, metavar="HEADS", help="go on from these heads; default: new ones")
    group.add_argument("--base", help="name of the base model in the heads' config.json; default: what --model says")
    group.add_argument("--device", help="where training runs; default: cuda where there is one, else cpu")
    medusa2_cli.add_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_command(build_parser(), _run, arguments, extra="train")


def _run(options: argparse.Namespace) -> None:
    for path in options.data:
        if path.is_file():
            raise UserError(
                f"{path}: a file, not a data folder",
                f"store its features first: medusa-distill --model {options.model} --conversations {path} -o DATA",
            )
    if options.model.endswith(".gguf"):
        os.environ.setdefault("TQDM_DISABLE", "1")  # as medusa-export does
    if options.method == medusa2_cli.MEDUSA_1:
        medusa2_cli.refuse_options(options)
        from medusa_engine.training import medusa1_run

        medusa1_run.run(options)
    else:
        from medusa_engine.training import medusa2_run

        medusa2_run.run(options)


if __name__ == "__main__":
    sys.exit(main())
