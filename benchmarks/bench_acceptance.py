"""What acceptance takes of a round of the demo model, under each acceptance policy of the bundle.

The stages are those of medusa-bench, see `stages.py`; the rest of the same rounds is the baseline. Exit status 0 either
way.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from medusa_engine.benchmarks.measure import Report, Samples, ratio_of
from medusa_engine.benchmarks.stage_times import profile_passes
from medusa_engine.benchmarks.stages import ACCEPTANCE, STAGES
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.policy import GREEDY, TYPICAL, AcceptancePolicy
from medusa_engine.runtime.tree import load_tree

ROOT = Path(__file__).resolve().parents[1]
CONTEXT = 256  # tokens in the cache
TREES = ("smollm2_8", "smollm2_64")
BARS = {GREEDY: 0.02, TYPICAL: 0.06}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, default=ROOT / "engines/smollm2-135m", help="bundle folder")
    parser.add_argument("--rounds", type=int, default=40, help="profiled per case; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and all samples")
    return parser


def main() -> int:
    options = build_parser().parse_args()
    report = Report()
    engine = Engine.open(options.engine)
    for tree in TREES:
        for policy in engine.manifest.policies:
            inside, outside = profiled(options, tree, policy)
            report.section(f"{tree}: a round under {policy}, context {CONTEXT}", [outside, inside])
            share = ratio_of("acceptance / rest of the round", inside, outside)
            if policy in BARS:
                report.bar(share, BARS[policy])
            else:
                print(share.line())
    if options.json:
        report.save(options.json, manifest=engine.manifest.document())
    return 0


def profiled(options: argparse.Namespace, tree: str, policy: str) -> tuple[Samples, Samples]:
    """Milliseconds per round inside acceptance and outside of it."""
    times = profile_passes(
        options.engine,
        load_tree(Path(tree)),
        context=CONTEXT,
        passes=options.rounds,
        policy=AcceptancePolicy(policy, seed=0),
    )
    inside = times.stage(ACCEPTANCE)
    outside = tuple(map(sum, zip(*(times.stage(stage) for stage in STAGES if stage != ACCEPTANCE), strict=True)))
    return Samples("acceptance", "ms", inside), Samples("rest of the round", "ms", outside)


if __name__ == "__main__":
    sys.exit(main())
