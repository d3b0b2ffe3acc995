"""Every node that a pass runs belongs to one stage, the right one, and the stages' times add up to the pass."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from tiny_models import Exported

from medusa_engine.benchmarks import stages
from medusa_engine.benchmarks.stage_times import BETWEEN, StageTimes, profile_passes
from medusa_engine.benchmarks.stages import (
    ACCEPTANCE,
    BACKBONE,
    BLOCKS,
    CACHE,
    FEEDBACK,
    HEADS,
    LM,
    PATH,
    POSTERIOR,
    STAGE_OF,
    STAGES,
    TOP_K,
    parts_of,
)
from medusa_engine.exporter import graphs
from medusa_engine.plugins.compact_append_kv import body
from medusa_engine.runtime.manifest import read_manifest
from medusa_engine.runtime.policy import GREEDY, REJECTION, SAMPLE, TYPICAL, AcceptancePolicy
from medusa_engine.runtime.tree import Tree, chain

LAYERS, KV, HEADS_COUNT = 2, 2, 3  # of `every_graph`; KV: keys and values
TREE = Tree(((0,), (1,), (0, 0)), "small")


def optimized(path: Path, folder: Path) -> onnx.GraphProto:
    """The graph that ONNX Runtime runs."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 3
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return onnx.load(options.optimized_model_filepath, load_external_data=False).graph


def nodes_by_part(graph: onnx.GraphProto) -> dict[str, Counter[str]]:
    """Part -> its operators."""
    parts = parts_of(graph)
    found: dict[str, Counter[str]] = defaultdict(Counter)
    waiting = list(graph.node)
    while waiting:
        node = waiting.pop()
        found[parts.pop(node.name)][node.op_type] += 1
        waiting += [inner for attribute in node.attribute for inner in attribute.g.node]
    assert not parts, "names of nodes that the graph does not have"
    return found


@pytest.mark.parametrize("optimize", [True, False], ids=["as run", "as exported"])
def test_every_graph_of_a_bundle_is_divided(every_graph: Exported, tmp_path: Path, optimize: bool) -> None:
    manifest = read_manifest(every_graph.bundle)
    assert len(manifest.graphs) == 14
    for name, file in manifest.graphs.items():
        path = every_graph.bundle / file
        graph = optimized(path, tmp_path) if optimize else onnx.load(path, load_external_data=False).graph
        found = nodes_by_part(graph)
        everywhere = sum(found.values(), Counter[str]())
        assert found[BACKBONE]["Attention"] == everywhere["Attention"] == LAYERS
        assert found[BACKBONE]["RotaryEmbedding"] == everywhere["RotaryEmbedding"] == 2 * LAYERS
        assert found[LM]["Gemm"] == 1, name
        cache = "TensorScatter" if optimize else "CompactAppendKV"
        assert found[CACHE][cache] == everywhere[cache] == (LAYERS * KV if optimize else LAYERS)
        rounds = name.startswith("round")
        assert bool(found[BLOCKS]) == rounds, name
        if rounds:
            assert found[BLOCKS]["Gemm"] + found[BLOCKS]["MatMul"] >= HEADS_COUNT, name
            assert found[FEEDBACK]["Concat"] >= 1, name  # of root and candidates, and those of lookup
        if rounds and REJECTION not in name:
            assert found[TOP_K]["TopK"] == 1 and found[BLOCKS]["If"] == 1, name
        if name in ("round", "step"):
            assert found[POSTERIOR]["ArgMax"] == 1, name
        assert found[PATH]["Min"] + found[PATH]["ReduceMin"] > 0, name  # the budget, and stop tokens


def profile(exported: Exported, tree: Tree | None, policy: AcceptancePolicy | None = None) -> StageTimes:
    return profile_passes(exported.bundle, tree, context=20, passes=4, threads=1, policy=policy)


@pytest.mark.parametrize("kind", [None, TREE, Tree((), "root")], ids=["step", "round", "root alone"])
def test_stage_times_add_up_to_the_pass(every_graph: Exported, kind: Tree | None) -> None:
    times = profile(every_graph, kind)
    assert len(times.passes) == 4 and (times.rows, times.context) == (kind.nodes if kind else 1, 20)
    assert times.name == (kind.name if kind else "plain step")
    for index, whole in enumerate(times.passes):
        stages = {stage: times.stage(stage)[index] for stage in (*STAGES, BETWEEN)}
        assert sum(stages.values()) == pytest.approx(whole)
        assert min(stages.values()) >= 0
        assert stages[BACKBONE] > 0 and stages[CACHE] > 0 and stages[LM] > 0 and stages[ACCEPTANCE] > 0
        parts = {name: values[index] for name, values in times.parts.items()}
        assert sum(parts.values()) == pytest.approx(whole)
        assert (parts[TOP_K] > 0) == (kind is TREE)  # the root alone and plain steps leave the heads out
    assert sum(times.shares().values()) == pytest.approx(1)
    assert set(times.shares()) == {*STAGES, BETWEEN}
    assert {*STAGE_OF.values()} == {*STAGES} and HEADS in STAGES


@pytest.mark.parametrize("policy", [SAMPLE, TYPICAL, REJECTION, GREEDY])
def test_rounds_of_every_policy_are_profiled(every_graph: Exported, policy: str) -> None:
    times = profile(every_graph, chain(3) if policy == REJECTION else TREE, AcceptancePolicy(policy, seed=1))
    assert all(sum(values) > 0 for part, values in times.parts.items() if part != TOP_K or policy != REJECTION)


def test_a_quantized_projection_counts_as_projection() -> None:
    def value(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)

    nodes = [
        helper.make_node("Gather", ["hidden_rows", "rows"], ["hidden"], "select"),
        helper.make_node("DynamicQuantizeLinear", ["hidden"], ["quantized", "scale", "zero"], "quantize"),
        helper.make_node("MatMulInteger", ["quantized", "weight", "zero"], ["sums"], "product"),
        helper.make_node("Cast", ["sums"], ["floats"], "cast", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["floats", "scale"], ["logits"], "scale"),
        helper.make_node("ArgMax", ["logits"], ["accepted_tokens"], "argmax"),
        helper.make_node("TopK", ["hidden", "k"], ["next_input_ids", "unused"], "rank"),
    ]
    graph = helper.make_graph(nodes, "quantized", [value("hidden_rows")], [value("accepted_tokens")])
    assert parts_of(graph) == {
        "select": BACKBONE,
        "quantize": LM,
        "product": LM,
        "cast": LM,
        "scale": LM,
        "argmax": POSTERIOR,
        "rank": TOP_K,
    }


def test_names_are_those_of_the_exporter() -> None:
    assert (stages.LOGITS_OUTPUT, stages.OP_TYPE) == (graphs.LOGITS_OUTPUT, body.OP_TYPE)


def test_graphs_that_are_not_ours_are_refused() -> None:
    nodes = [helper.make_node("ArgMax", ["x"], ["logits"], "argmax")]
    with pytest.raises(RuntimeError, match="no matrix product"):
        parts_of(helper.make_graph(nodes, "no product", [], []))
    with pytest.raises(RuntimeError, match="without a name"):
        parts_of(helper.make_graph([helper.make_node("ArgMax", ["x"], ["logits"])], "no name", [], []))
