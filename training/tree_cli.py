"""`medusa-tree`: calibrate an engine's heads, search the tree that pays on this machine, draw trees."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_engine.runtime.command_line import run_command
from medusa_engine.runtime.errors import UserError


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="medusa-tree", description="Calibrate heads and search trees.")
    commands = parser.add_subparsers(dest="command", required=True)
    calibrate = commands.add_parser("calibrate", help="note at which rank each head lists what the target publishes")
    calibrate.add_argument("--engine", required=True, type=Path, help="bundle folder")
    calibrate.add_argument("--prompts", required=True, type=Path, help="one prompt per line, held out from training")
    calibrate.add_argument("--chat", action="store_true", help="apply the chat template to every prompt")
    calibrate.add_argument("--max-new-tokens", type=int, default=128, help="per prompt; default: %(default)s")
    calibrate.add_argument("--threads", type=int, default=0, help="default: one per physical core")
    calibrate.add_argument("-o", "--output", required=True, type=Path, help="calibration file")
    search = commands.add_parser("search", help="search a tree from a calibration")
    search.add_argument("calibration", type=Path)
    size = search.add_mutually_exclusive_group(required=True)
    size.add_argument("--nodes", type=int, help="rows of the tree, root included")
    size.add_argument("--for-engine", type=Path, help="measure this bundle's rounds and take the fastest tree")
    search.add_argument("--marginal", action="store_true", help="take heads as independent, as the paper does")
    search.add_argument("--threads", type=int, default=0, help="with --for-engine; default: one per physical core")
    search.add_argument("-o", "--output", required=True, type=Path, help="tree file")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_command(build_parser(), _run, arguments, extra="train")


def _run(options: argparse.Namespace) -> None:
    if options.command == "calibrate":
        _calibrate(options)
    else:
        _search(options)


def _calibrate(options: argparse.Namespace) -> None:
    from medusa_engine.runtime.engine import Engine
    from medusa_engine.runtime.manifest import file_sha256
    from medusa_engine.runtime.text import read_prompt_file
    from medusa_engine.training.calibrate import calibrate, engine_provenance

    lines = [line for line in read_prompt_file(options.prompts).splitlines() if line.strip()]
    if not lines:
        raise UserError(f"{options.prompts}: holds no prompts", "write one prompt per line")
    engine = Engine.open(options.engine, threads=options.threads)
    prompts = [engine.encode([{"role": "user", "content": line}] if options.chat else line) for line in lines]
    provenance = engine_provenance(options.engine, engine) | {
        "prompts_sha256": file_sha256(options.prompts),
        "chat": options.chat,
        "max_new_tokens": options.max_new_tokens,
    }

    def progress(done: int) -> None:
        print(f"{done}/{len(prompts)} answers", file=sys.stderr, flush=True)

    calibration = calibrate(
        engine, prompts, max_new_tokens=options.max_new_tokens, provenance=provenance, progress=progress
    )
    calibration.save(options.output)
    print(options.output)


def _search(options: argparse.Namespace) -> None:
    from medusa_engine.training.calibrate import load_calibration
    from medusa_engine.training.json_file import write_json
    from medusa_engine.training.tree_search import best_first, expected_published, joint_mass, marginal_mass, rank_mass

    calibration = load_calibration(options.calibration)
    ranks = calibration.ranks
    mass = marginal_mass(rank_mass(ranks, calibration.topk)) if options.marginal else joint_mass(ranks)
    counts = "marginal" if options.marginal else "joint"
    metadata: dict[str, Any] = {"counts": counts, "calibration": calibration.provenance}
    if options.nodes is not None:
        if options.nodes < 1:
            raise UserError(f"--nodes is {options.nodes}", "give 1 or more")
        tree = best_first(mass, nodes=options.nodes, heads=calibration.heads, topk=calibration.topk)
        metadata["expected_published"] = expected_published(tree, mass)
    else:
        from medusa_engine.runtime.engine import Engine
        from medusa_engine.training.engine_search import search_for_engine

        engine = Engine.open(options.for_engine, threads=options.threads)
        tree, facts = search_for_engine(engine, calibration, report=lambda line: print(line, file=sys.stderr))
        metadata |= facts
    document = {
        "name": options.output.stem,
        "description": f"{tree.nodes} nodes, best first on {metadata['counts']} counts of {len(ranks)} positions",
        "heads": calibration.heads,
        "topk": calibration.topk,
        "probabilities": [mass(path) for path in tree.paths],
        "metadata": metadata,
        "paths": [list(path) for path in tree.paths],
    }
    write_json(options.output, document)
    print(options.output)


if __name__ == "__main__":
    sys.exit(main())
