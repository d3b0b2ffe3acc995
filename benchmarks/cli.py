"""`medusa-bench`: measure an engine on this machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from medusa_engine.benchmarks.settings import CONTEXTS, OTHERS, SWEEP, BenchSettings
from medusa_engine.exporter.output_file import check_output, check_output_folder, make_folder, write_file
from medusa_engine.runtime.command_line import EXIT_USER_ERROR, add_version, run_command
from medusa_engine.runtime.huge_pages import restart_with_huge_pages

_OUTPUTS = {"report": (".html", ".htm"), "json": (".json",)}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="medusa-bench",
        description="Measure prompts, plain steps and rounds, trees of several sizes, whole answers, and where the time"
        " goes. The exit status is 1 if an answer is not that of plain decoding; times judge nothing. Close what else"
        " is running first.",
    )
    numbers = ",".join
    parser.add_argument("--engine", required=True, type=Path, help="bundle folder")
    parser.add_argument(
        "--context",
        type=_numbers,
        dest="contexts",
        metavar="N,N,...",
        help=f"tokens in the cache while passes are timed; default: of {numbers(map(str, CONTEXTS))} those that fit",
    )
    parser.add_argument(
        "--sweep",
        type=_numbers,
        metavar="N,N,...",
        help="grow trees of so many nodes from what heads and lookup get right, and time their rounds; default: of"
        f" {numbers(map(str, SWEEP))} those that the engine runs",
    )
    parser.add_argument(
        "--tree",
        type=Path,
        action="append",
        default=[],
        dest="trees",
        metavar="TREE",
        help="measure this tree, a file or the name of a shipped one, beside the bundle's own; may be given again",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="one prompt per line, or a .json object of categories with lists of prompts; default: 48 of our own in"
        " eight categories, and 12 of three grounded tasks",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=BenchSettings.max_new_tokens,
        help="of each answer; default: %(default)s",
    )
    parser.add_argument(
        "--answer-repeats",
        type=int,
        default=BenchSettings.answer_repeats,
        metavar="N",
        help="answer each prompt so often in each way, one pass over all prompts after the other: the median counts,"
        " and the least and the largest speed-up stand beside it; default: %(default)s",
    )
    parser.add_argument(
        "--against",
        action="append",
        choices=OTHERS,
        default=[],
        help="let this runtime answer the same prompts with the same weights; may be given again",
    )
    parser.add_argument(
        "--model", help="for --against: what the bundle was exported from: folder, hub id or .gguf file"
    )
    parser.add_argument(
        "--ledger",
        action="store_true",
        help="also count FLOPs and bytes of each part of a round, and draw this machine's roofline over T(N)",
    )
    parser.add_argument(
        "--repeats", type=int, default=BenchSettings.repeats, help="samples of each timed pass; default: %(default)s"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=BenchSettings(Path()).threads,
        help="of every runtime; default: one for each CPU that this process may use",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="also write a page, .html, that needs no network")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all samples, .json")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="also write the page's pictures, .svg and .png")
    add_version(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    if arguments is None:  # the process is this command's own
        restart_with_huge_pages()  # as the commands that it measures
    exact: list[bool] = []
    status = run_command(build_parser(), lambda options: exact.append(_run(options)), arguments, extra="bench")
    return status if all(exact) else EXIT_USER_ERROR


def _run(options: argparse.Namespace) -> bool:
    """Whether every answer was that of plain decoding."""
    asked = vars(options).copy()
    outputs = {name: asked.pop(name) for name in _OUTPUTS}
    figures = asked.pop("figures")
    for name, path in outputs.items():
        if path is not None:
            check_output(path, suffixes=_OUTPUTS[name], option=f"--{name}")
    if figures is not None:
        check_output_folder(figures, option="--figures")
    os.environ.setdefault("TQDM_DISABLE", "1")  # of libraries that load weights; `_steps` says what it wants
    from medusa_engine.benchmarks.bench import run_bench
    from medusa_engine.benchmarks.document import document
    from medusa_engine.benchmarks.figures import pictures
    from medusa_engine.benchmarks.page import page
    from medusa_engine.benchmarks.text import text

    asked["trees"], asked["against"] = tuple(asked["trees"]), tuple(asked["against"])
    found = run_bench(BenchSettings(**asked), _steps)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    print(text(found))
    if outputs["json"] is not None:
        write_file(outputs["json"], f"{json.dumps(document(found), indent=1)}\n".encode(), option="--json")
    drawn = pictures(found, ".svg") if outputs["report"] is not None or figures is not None else {}
    if outputs["report"] is not None:
        write_file(outputs["report"], page(found, drawn).encode(), option="--report")
    if figures is not None:
        make_folder(figures, option="--figures")
        for suffix, files in ((".svg", drawn), (".png", pictures(found, ".png"))):
            for name, data in files.items():
                write_file(figures / f"{name}{suffix}", data, option="--figures")
    return found.exact


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers, as in 1,2,4") from error


@contextmanager
def _steps(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error while the block runs, where that is a terminal."""
    from tqdm import tqdm

    with tqdm(total=total, desc=title, disable=None, leave=False, file=sys.stderr) as bar:
        yield lambda: (bar.update(), None)[1]


if __name__ == "__main__":
    sys.exit(main())
