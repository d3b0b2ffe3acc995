"""What acceptance takes of a round of the demo model: the nodes between the target's logits and the heads.

ONNX Runtime's profiler times every node of a round; those that depend on the logits and not on the heads' hidden row
are acceptance, stopping included. The rest of the same rounds is the baseline. Exit status 0 either way.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import onnx
from measure import Report, Samples, ratio_of
from passes import FixedContext

from medusa_engine.exporter.graphs import LOGITS_OUTPUT
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.manifest import graph_name
from medusa_engine.runtime.onnxruntime_backend import OnnxRuntimeBackend
from medusa_engine.runtime.policy import GREEDY, TYPICAL, AcceptancePolicy

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
            graph = options.engine / engine.manifest.graphs[graph_name("round", policy)]
            inside, outside = profiled(options.engine, tree, policy, acceptance_nodes(graph), options.rounds)
            report.section(f"{tree}: a round under {policy}, context {CONTEXT}", [outside, inside])
            share = ratio_of("acceptance / rest of the round", inside, outside)
            if policy in BARS:
                report.bar(share, BARS[policy])
            else:
                print(share.line())
    if options.json:
        report.save(options.json, manifest=engine.manifest.document())
    return 0


def acceptance_nodes(path: Path) -> set[str]:
    """Names of the nodes that depend on the logits but not on the hidden row that the heads read."""
    graph = onnx.load(path, load_external_data=False).graph
    producers = {value: node for node in graph.node for value in node.output}
    projection = producers[LOGITS_OUTPUT]
    while projection.op_type not in ("Gemm", "MatMul"):
        projection = producers[projection.input[0]]
    behind = users(graph.node, {LOGITS_OUTPUT})
    heads = users(behind, {projection.input[0]})  # they read the winning row of the projection's own input
    return {node.name for node in behind} - {node.name for node in heads}


def users(nodes: Iterable[onnx.NodeProto], values: set[str]) -> list[onnx.NodeProto]:
    """Those of the nodes, in their order, that depend on one of the values, by a branch of theirs too."""
    known, found = set(values), []
    for node in nodes:
        inner = (inner for attribute in node.attribute for inner in attribute.g.node)
        if known & {*node.input, *(name for branch_node in inner for name in branch_node.input)}:
            known |= set(node.output)
            found.append(node)
    return found


def profiled(folder: Path, tree: str, policy: str, acceptance: set[str], rounds: int) -> tuple[Samples, Samples]:
    """Milliseconds per round inside these nodes and outside of them."""
    with tempfile.TemporaryDirectory() as traces:
        engine = Engine.open(folder)
        backend = engine.backend
        assert isinstance(backend, OnnxRuntimeBackend)
        backend._options.enable_profiling = True
        backend._options.profile_file_prefix = f"{traces}/round"
        context = FixedContext(engine, CONTEXT, ROOT / f"trees/{tree}.json", AcceptancePolicy(policy, seed=0))
        session = backend.session(graph_name("round", policy))
        for _ in range(rounds):
            context.rewind()
            context.run()
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    inside, outside = Counter[int](), Counter[int]()
    run = -1
    for event in sorted(events, key=lambda event: event["ts"]):
        name = event["name"]
        if name == "model_run":
            run += 1
        elif name.endswith("_kernel_time") and event["args"].get("op_name") != "If":
            counter = inside if name.removesuffix("_kernel_time") in acceptance else outside
            counter[run] += event["dur"]
    kept = range(run + 1 - rounds, run + 1)  # the runs before are the prompt
    return (
        Samples("acceptance", "ms", tuple(inside[index] / 1000 for index in kept)),
        Samples("rest of the round", "ms", tuple(outside[index] / 1000 for index in kept)),
    )


if __name__ == "__main__":
    sys.exit(main())
