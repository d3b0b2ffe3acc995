"""Trees that change from round to round beside every tree that stays, and beside plain steps.

Every prompt is answered greedily in each way, one answer after the other; the ids must be the same. Each way of
choosing keeps what it has measured from prompt to prompt, as an engine does. Bars are judged, but the exit status is 0
either way, unless an answer differs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from medusa_engine.benchmarks.measure import Report, Samples
from medusa_engine.runtime.adaptive_plans import AdaptiveTrees
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.rounds import Decoding
from medusa_engine.runtime.tree import load_tree
from medusa_engine.runtime.tree_plan import TreePlan

ROOT = Path(__file__).resolve().parents[1]
ADAPTIVE_BAR = 0.95  # of the tokens per second of the best tree that stays, plain steps among them


@dataclass
class Way:
    """A way to decode, and what came of it.

    Attributes:
        plans: None for plain steps; every answer is a session of its own.
        speeds: tokens per second of each prompt's answer, without the prompt's own time.
        tokens, seconds: of all answers.
        rounds: of each tree.
    """

    name: str
    plans: TreePlan | AdaptiveTrees | None
    speeds: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    rounds: Counter[str] = field(default_factory=Counter)

    def answer(self, engine: Engine, prompt_ids: list[int], max_new_tokens: int) -> list[int]:
        """Decode one prompt and count it."""
        decoding = Decoding(
            engine.backend.new_state(),
            engine.limits,
            prompt_ids,
            plan=self.plans.session() if isinstance(self.plans, AdaptiveTrees) else self.plans,
            max_new_tokens=max_new_tokens,
            stop_ids=engine.stop_token_ids,
        )
        rounds = list(decoding)
        tokens = [token for round_ in rounds for token in round_.token_ids]
        seconds = sum(round_.seconds for round_ in rounds)
        self.speeds.append(len(tokens) / seconds)
        self.tokens += len(tokens)
        self.seconds += seconds
        self.rounds.update(round_.tree for round_ in rounds)
        return tokens

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, default=ROOT / "engines/smollm2-135m", help="bundle folder")
    parser.add_argument(
        "--prompts", type=Path, default=ROOT / "benchmarks/prompts/held_out.txt", help="one per line, as chat messages"
    )
    parser.add_argument(
        "--tree",
        type=Path,
        default=ROOT / "trees/smollm2_64.json",
        help="a tree that is slow here, beside the engine's own; default: %(default)s",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="per prompt; default: %(default)s")
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="default: one for each CPU that this process may use",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and all samples")
    return parser


def main() -> int:
    options = build_parser().parse_args()
    engine = Engine.open(options.engine, threads=options.threads)
    for speculation in (True, False):
        engine.load(speculation=speculation)
    limits, own, slow = engine.limits, engine.trees, load_tree(options.tree)
    kept = [Way("plain steps", None)]
    kept += [Way(f"{tree.name}, {counted(tree.nodes, 'node')}", TreePlan(tree, limits)) for tree in (*own, slow)]
    changing = [
        Way("adaptive: the engine's trees", AdaptiveTrees(own, limits, late=True)),
        Way(f"adaptive: {slow.name} first", AdaptiveTrees([slow, *own], limits, late=True)),
        Way(f"adaptive: {slow.name} alone", AdaptiveTrees([slow], limits, late=True)),
    ]
    ways = kept + changing
    prompts = [line for line in options.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    differing = 0
    for index, prompt in enumerate(prompts):
        prompt_ids = engine.encode([{"role": "user", "content": prompt}])
        turn = index % len(ways)
        answers = [way.answer(engine, prompt_ids, options.max_new_tokens) for way in ways[turn:] + ways[:turn]]
        differing += sum(answer != answers[0] for answer in answers)
        print(f"\r{index + 1}/{len(prompts)} prompts", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)

    report = Report()
    samples = [Samples(way.name, "tok/s", tuple(way.speeds)) for way in ways]
    report.section(f"greedy answers; {differing} differ", samples)
    for way in changing:
        rounds = ", ".join(f"{name} {count}" for name, count in way.rounds.most_common())
        print(f"  rounds of {way.name}: {rounds}")
    bars = report.sections[-1]["bars"]
    assert isinstance(bars, list)
    for way, candidates in zip(changing, (kept[:-1], kept, [kept[0], kept[-1]]), strict=True):
        best = max(candidates, key=lambda way: way.speed)
        value = way.speed / best.speed
        name = f"{way.name} / {best.name}"
        verdict = "holds" if value >= ADAPTIVE_BAR else "does not hold"
        print(f"  {name:<60}{value:9.3f} x   bar >= {ADAPTIVE_BAR}: {verdict}")
        bars.append({"name": name, "values": [value], "bar": ADAPTIVE_BAR, "holds": value >= ADAPTIVE_BAR})
    if options.json:
        chosen = {name: None if value is None else str(value) for name, value in vars(options).items()}
        counts = {way.name: dict(way.rounds) for way in ways}
        report.save(options.json, options=chosen, manifest=engine.manifest.document(), rounds=counts)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
