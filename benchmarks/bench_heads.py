"""Heads on prompts they have never seen: tokens a round publishes, and speed beside the same engine's plain steps.

Every prompt is answered greedily with plain steps and with each tree, one answer after the other; the ids must be the
same. The bars are judged, but the exit status is 0 either way, unless an answer differs.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from measure import Report, Samples

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.generation import Generation
from medusa_engine.runtime.tree import load_tree
from medusa_engine.training.speed_check import Measured

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED_BARS = {8: 1.60, 64: 1.85}  # nodes -> least tokens per round
SPEED_BAR = 1.10  # of the demo's own tree over plain steps


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, default=ROOT / "engines/smollm2-135m", help="bundle folder")
    parser.add_argument(
        "--prompts", type=Path, default=ROOT / "benchmarks/prompts/held_out.txt", help="one per line, as chat messages"
    )
    parser.add_argument(
        "--tree",
        type=Path,
        action="append",
        help="may be given again; default: the engine's own, trees/smollm2_8.json and trees/smollm2_64.json",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="per prompt; default: %(default)s")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and all samples")
    return parser


def main() -> int:
    options = build_parser().parse_args()
    engine = Engine.open(options.engine, threads=options.threads)
    given = options.tree or [ROOT / f"trees/smollm2_{nodes}.json" for nodes in PUBLISHED_BARS]
    trees = [*([] if options.tree else [engine.tree]), *map(load_tree, given)]
    prompts = [line for line in options.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    answers: list[list[Generation]] = [[] for _ in range(1 + len(trees))]  # plain ones first
    for index, prompt in enumerate(["warm up", *prompts]):
        for kind, tree in enumerate([None, *trees]):
            answer = engine.generate(
                [{"role": "user", "content": prompt}],
                max_new_tokens=options.max_new_tokens,
                speculation=tree is not None,
                tree=tree,
            )
            if index:
                answers[kind].append(answer)
        print(f"\r{index}/{len(prompts)} prompts", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    report = Report()
    plain, *speculative = answers
    baseline = Samples("plain step", "tok/s", tuple(map(tokens_per_second, plain)))
    same = True
    for number, (tree, decoded) in enumerate(zip(trees, speculative, strict=True)):
        pairs = Measured(decoded, plain)
        same = same and not pairs.differing
        measured = Samples(f"{tree.nodes}-node tree", "tok/s", tuple(map(tokens_per_second, decoded)))
        report.section(
            f"{tree.name}: {tree.nodes} nodes, depth {tree.depth}; {pairs.differing} answers differ",
            [baseline, measured],
        )
        own = number == 0 and not options.tree
        least(report, "tokens per second / plain", pairs.speed_up, SPEED_BAR if own else None)
        least(report, "tokens per round, E[G]", pairs.published, None if own else PUBLISHED_BARS.get(tree.nodes))
    if options.json:
        chosen = {name: None if value is None else str(value) for name, value in vars(options).items()}
        report.save(options.json, options=chosen, manifest=engine.manifest.document())
    return 0 if same else 1


def tokens_per_second(answer: Generation) -> float:
    return answer.generated_tokens / answer.timings.decode


def least(report: Report, name: str, value: float, bar: float | None) -> None:
    """Print a figure over all prompts, and hold it against the least value that will do."""
    judged = "" if bar is None else f"   bar >= {bar:.2f}: {'holds' if value >= bar else 'does not hold'}"
    print(f"  {name:<48}{value:9.3f}{judged}", flush=True)
    bars = report.sections[-1]["bars"]
    assert isinstance(bars, list)
    bars.append({"name": name, "values": [value], "bar": bar, "holds": bar is None or value >= bar})


if __name__ == "__main__":
    sys.exit(main())
