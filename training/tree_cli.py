"""`medusa-tree`: calibrate an engine's heads and lookup, search the tree that pays on this machine, draw trees."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_engine.runtime.command_line import add_version, run_command
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError
from medusa_engine.training.tree_settings import AUTO, COUNTS

if TYPE_CHECKING:
    from medusa_engine.training.calibration import Calibration

MAX_NEW_TOKENS = 128
MEASURED_ANSWERS = 16


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="medusa-tree", description="Calibrate heads and lookup, search trees and draw them."
    )
    add_version(parser)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_calibrate(commands.add_parser("calibrate", help="count how often heads and lookup have what is published"))
    _add_search(commands.add_parser("search", help="search a tree from a calibration"))
    _add_show(commands.add_parser("show", help="sketch a tree in the terminal, or draw it"))
    return parser


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", required=True, type=Path, help="bundle folder")
    parser.add_argument("--prompts", required=True, type=Path, help="one prompt per line, held out from training")
    parser.add_argument("--chat", action="store_true", help="apply the chat template to every prompt")
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS, help="per prompt; default: %(default)s")
    parser.add_argument("--threads", type=int, default=0, help="default: one per physical core")
    parser.add_argument("-o", "--output", required=True, type=Path, help="calibration file")


def _add_search(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("calibration", type=Path, help="file written by medusa-tree calibrate")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--nodes", type=int, help="rows of the tree, root included")
    size.add_argument(
        "--for-engine",
        type=Path,
        metavar="ENGINE",
        help="time this bundle's rounds here, take the tree that publishes most tokens per second, and measure it",
    )
    parser.add_argument(
        "--counts",
        choices=(AUTO, *COUNTS),
        default=AUTO,
        help="what a path weighs: marginal, the product of its ranks' mass, as in the paper; joint, the share of"
        " positions that accept it; default: what publishes more on held-out answers",
    )
    lookup = parser.add_mutually_exclusive_group()
    lookup.add_argument(
        "--lookup-depth",
        type=int,
        metavar="N",
        help="lookup nodes that the tree may have; default: as many as the engine offers",
    )
    lookup.add_argument("--no-lookup", action="store_true", help="give the tree no lookup nodes")
    parser.add_argument(
        "--measure",
        type=int,
        metavar="N",
        help=f"with --for-engine: check the prediction on up to N held-out prompts; default: {MEASURED_ANSWERS}",
    )
    parser.add_argument("--threads", type=int, help="with --for-engine; default: one per physical core")
    parser.add_argument("-o", "--output", required=True, type=Path, help="tree file")


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tree", type=Path, help="tree file, or the name of a shipped tree")
    parser.add_argument("--calibration", type=Path, help="take the nodes' probabilities from here, not from the tree")
    parser.add_argument(
        "--counts",
        choices=COUNTS,
        default=COUNTS[1],
        help="of the calibration; default: %(default)s; trees with lookup are replayed on its answers instead",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        action="append",
        help=".svg or .png file; default: a sketch in the terminal",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_command(build_parser(), _run, arguments, extra="train")


def _run(options: argparse.Namespace) -> None:
    commands = {"calibrate": _calibrate, "search": _search, "show": _show}
    commands[options.command](options)


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _calibrate(options: argparse.Namespace) -> None:
    from medusa_engine.exporter.output_file import check_output
    from medusa_engine.runtime.engine import Engine
    from medusa_engine.runtime.manifest import file_sha256
    from medusa_engine.training.calibrate import calibrate
    from medusa_engine.training.calibration import engine_provenance
    from medusa_engine.training.lookup_hits import lookup_lines

    check_output(options.output)
    if options.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens is {options.max_new_tokens}", "give 1 or more")
    lines = _prompt_lines(options.prompts)
    engine = Engine.open(options.engine, threads=options.threads)
    if engine.tokenizer is None:
        raise UserError(f"{options.engine}: this bundle has no tokenizer", "export the model with its tokenizer")
    most = engine.limits.max_length - 1
    prompts = []
    for number, line in lines:
        prompts.append(engine.encode([{"role": "user", "content": line}] if options.chat else line))
        if not 0 < len(prompts[-1]) <= most:
            raise UserError(
                f"{options.prompts}: line {number} has {counted(len(prompts[-1]), 'token')}; 1 to {most} leave room for"
                " an answer",
                "shorten the line, or export with a larger medusa-export --max-length",
            )
    provenance = engine_provenance(
        engine,
        chat=options.chat,
        max_new_tokens=options.max_new_tokens,
        prompts_sha256=file_sha256(options.prompts),
    )
    calibration = calibrate(
        engine,
        prompts,
        max_new_tokens=options.max_new_tokens,
        provenance=provenance,
        progress=lambda done, tokens: _report(f"{done}/{len(prompts)} answers, {counted(tokens, 'token')}"),
    )
    calibration.save(options.output)
    counts = calibration.lookup_counts()
    for line in lookup_lines(counts) if counts is not None else []:
        _report(line)
    print(options.output)


def _prompt_lines(path: Path) -> list[tuple[int, str]]:
    """The lines of a prompt file that are not blank, with their numbers."""
    from medusa_engine.runtime.text import read_prompt_file

    lines = [(number, line) for number, line in enumerate(read_prompt_file(path).split("\n"), 1) if line.strip()]
    if not lines:
        raise UserError(f"{path}: holds no prompts", "write one prompt per line")
    return [(number, line.removesuffix("\r")) for number, line in lines]


def _search(options: argparse.Namespace) -> None:
    from medusa_engine.exporter.output_file import check_output
    from medusa_engine.runtime.engine import Engine
    from medusa_engine.training.calibration import check_calibrated, load_calibration
    from medusa_engine.training.json_file import write_json
    from medusa_engine.training.searched_tree import search_engine, search_nodes

    check_output(options.output)
    calibration = load_calibration(options.calibration)
    for name in ("measure", "threads"):
        if options.nodes is not None and getattr(options, name) is not None:
            raise UserError(f"--{name} is given with --nodes", "leave it out: nothing is measured")
    if options.nodes is not None:
        lookup = _lookup_nodes(options, calibration, calibration.lookup)
        document = search_nodes(calibration, options.nodes, counts=options.counts, lookup=lookup, report=_report)
    else:
        engine = Engine.open(options.for_engine, threads=options.threads or 0)
        check_calibrated(calibration, engine, options.calibration)
        measured = MEASURED_ANSWERS if options.measure is None else options.measure
        offered = engine.limits.lookup
        lookup = _lookup_nodes(options, calibration, offered)
        if lookup > offered:
            raise UserError(
                f"--lookup-depth is {lookup}, but {options.for_engine} offers {counted(offered, 'lookup node')}",
                f"give fewer, or export with medusa-export --lookup-depth {lookup}",
            )
        document = search_engine(
            calibration,
            engine,
            counts=options.counts,
            measured_answers=measured,
            lookup=lookup,
            report=_report,
        )
    write_json(options.output, {"name": options.output.stem, **document})
    print(options.output)


def _lookup_nodes(options: argparse.Namespace, calibration: Calibration, offered: int | None) -> int:
    """Lookup nodes that a searched tree may have.

    Args:
        offered: by the engine; None where that is not known.

    Raises:
        UserError: the calibration knows nothing of lookup, or there are never so many.
    """
    from medusa_engine.runtime.tree import MOST_LOOKUP

    asked = options.lookup_depth
    if options.no_lookup:
        return 0
    if asked is not None and not 1 <= asked <= MOST_LOOKUP:
        raise UserError(f"--lookup-depth is {asked}", f"give 1 to {MOST_LOOKUP}, or --no-lookup")
    if calibration.lookup is not None:
        return (offered or 0) if asked is None else asked
    if asked is not None:
        raise UserError(
            f"{options.calibration}: was written without lookup, but --lookup-depth is given",
            "calibrate again with medusa-tree calibrate, or leave the option out",
        )
    if offered != 0:
        _report(f"{options.calibration} was written without lookup: the tree has no lookup nodes; calibrate again")
    return 0


def _show(options: argparse.Namespace) -> None:
    from medusa_engine.exporter.output_file import check_output, write_file
    from medusa_engine.runtime.tree import load_tree
    from medusa_engine.training.calibration import load_calibration
    from medusa_engine.training.node_probabilities import calibrated_probabilities, probabilities_of_file
    from medusa_engine.training.tree_drawing import FORMATS, draw
    from medusa_engine.training.tree_sketch import sketch

    outputs: list[Path] = options.output or []
    for output in outputs:
        check_output(output, suffixes=FORMATS)
    tree = load_tree(options.tree)
    if options.calibration is not None:
        probabilities = calibrated_probabilities(tree, load_calibration(options.calibration), options.counts)
    else:
        probabilities = probabilities_of_file(options.tree)
    if not outputs:
        print(sketch(tree, probabilities))
    for output in outputs:
        write_file(output, draw(tree, probabilities, output.suffix.lower()))
        print(output)


if __name__ == "__main__":
    sys.exit(main())
