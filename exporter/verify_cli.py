"""`medusa-verify`: hold an engine against the checkpoint it was exported from, round by round."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from medusa_engine.exporter.output_file import check_output, write_file
from medusa_engine.exporter.verify_settings import VerifySettings
from medusa_engine.runtime.command_line import EXIT_USER_ERROR, add_version, run_command


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="medusa-verify",
        description="Compare checkpoint, bundle and plan over many rounds: the logits of every row, greedy ids,"
        " accepted lengths, cache rows, drafts. The exit status is 1 on a fault, and 0 where they are the same or part"
        " at near-ties only, which are reported.",
    )
    parser.add_argument("--model", required=True, help="the checkpoint: Hugging Face folder, hub id or .gguf file")
    parser.add_argument("--engine", required=True, type=Path, help="bundle folder, or a plan")
    parser.add_argument("--plan", type=Path, help="a plan that was built from the bundle, to compare as well")
    parser.add_argument("--heads", help="heads of the engine; not needed if the model brings its own")
    parser.add_argument(
        "--tree",
        action="append",
        type=Path,
        default=[],
        dest="trees",
        metavar="TREE",
        help="verify this tree, a file or the name of a shipped one; given again, rounds take them in turn; default:"
        " the trees of the engine",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="one prompt per line, or a .json list of texts, conversations or token ids; default: a few built-in ones",
    )
    parser.add_argument("--chat", action="store_true", help="apply the chat template to the texts")
    parser.add_argument(
        "--rounds",
        type=int,
        default=VerifySettings.rounds,
        help="of each prompt; stop tokens do not end them, the cache does; default: %(default)s",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        help="share of a row's largest logit by which logits may differ, and up to which two tokens are a near-tie;"
        " default: 1e-4 for float32, 2e-2 for float16",
    )
    parser.add_argument("--threads", type=int, default=VerifySettings.threads, help="default: one per physical core")
    parser.add_argument("--report", type=Path, metavar="FILE", help="also write a page, .html, that needs no network")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    add_version(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    faults: list[bool] = []
    status = run_command(build_parser(), lambda options: faults.append(_run(options)), arguments, extra="export")
    return EXIT_USER_ERROR if any(faults) else status


def _run(options: argparse.Namespace) -> bool:
    """Whether there is a fault."""
    asked = vars(options).copy()
    report, as_json = asked.pop("report"), asked.pop("json")
    if report is not None:
        check_output(report, suffixes=(".html", ".htm"), option="--report")
    if options.model.endswith(".gguf"):
        os.environ.setdefault("TQDM_DISABLE", "1")  # see `medusa-export`
    from medusa_engine.exporter.verify import verify
    from medusa_engine.exporter.verify_page import page
    from medusa_engine.exporter.verify_report import document, text

    asked["trees"] = tuple(asked["trees"])
    found = verify(VerifySettings(**asked), lambda line: print(line, file=sys.stderr, flush=True))
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    print(json.dumps(document(found)) if as_json else text(found))
    if report is not None:  # behind the verdict, which a full disk must not cost
        write_file(report, page(found).encode("utf-8"), option="--report")
    return found.fault


if __name__ == "__main__":
    sys.exit(main())
