"""The self-test of a new plan, with ONNX Runtime in the place of the GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import round_graph
from onnx import TensorProto, numpy_helper
from round_graph import RoundGraph

from medusa_engine.exporter.plan_io import plan_io
from medusa_engine.exporter.self_test import LEAST_EQUAL, PROMPTS, ROUNDS, GraphRounds, PlanRounds, Tokens, compare
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import read_manifest
from medusa_engine.runtime.tree import load_tree
from medusa_engine.runtime.tree_buffers import TreeBuffers
from medusa_engine.runtime.tree_plan import TreePlan

if TYPE_CHECKING:
    from tiny_models import Rigged

PLAN = Path("engines/model.plan")


def graph_rounds(folder: Path, change: round_graph.Change | None = None) -> GraphRounds:
    bundle = round_graph.save_bundle(folder, change=change)
    manifest = read_manifest(bundle)
    io = plan_io(manifest, "greedy", len(round_graph.STOP_IDS))
    return GraphRounds(bundle / "round.onnx", io, manifest.limits, buffers(bundle), {})


def buffers(bundle: Path) -> TreeBuffers:
    return TreePlan(load_tree(bundle / "tree.json"), round_graph.limits()).full


def other_weights(graph: RoundGraph) -> None:
    (weights,) = (tensor for tensor in graph.constants if tensor.name == "w_value.1")
    weights.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(weights), weights.name))


def other_mask(graph: RoundGraph) -> None:
    """Committed rows are hidden, too."""
    (node,) = (node for node in graph.nodes if node.output[0] == "committed")
    node.input[1] = graph.constant("never", np.array([-1000]))


def test_plan_that_computes_the_same_passes(tmp_path: Path) -> None:
    rounds = graph_rounds(tmp_path / "one")
    result = compare(rounds, graph_rounds(tmp_path / "other"), round_graph.limits(), PLAN)
    assert result == f"{PROMPTS} of {PROMPTS} prompts, {ROUNDS} rounds each, as on ONNX Runtime"


@pytest.mark.parametrize("change", [other_weights, other_mask], ids=lambda change: change.__name__)
def test_plan_that_computes_something_else_fails(change: round_graph.Change, tmp_path: Path) -> None:
    right, wrong = graph_rounds(tmp_path / "right"), graph_rounds(tmp_path / "wrong", change)
    with pytest.raises(UserError, match=r"model\.plan: the plan does not compute what its graph does: [0-5] of 8"):
        compare(wrong, right, round_graph.limits(), PLAN)


@pytest.mark.parametrize("equal", [LEAST_EQUAL - 1, LEAST_EQUAL])
def test_few_near_ties_are_forgiven(equal: int) -> None:
    class Scripted:
        def __init__(self, differing: int) -> None:
            self.differing = differing

        def answer(self, prompt: Any) -> list[Tokens]:
            self.differing -= 1
            return [[1], [2], [3 if self.differing < 0 else 4]]

    plan, reference = Scripted(PROMPTS - equal), Scripted(0)
    if equal < LEAST_EQUAL:
        with pytest.raises(UserError, match=f"{equal} of {PROMPTS} prompts"):
            compare(plan, reference, round_graph.limits(), PLAN)
    else:
        assert compare(plan, reference, round_graph.limits(), PLAN).startswith(f"{equal} of {PROMPTS}")


def test_prompts_and_rounds_fit_the_cache(tmp_path: Path) -> None:
    lengths = []

    class Recorder:
        def answer(self, prompt: Any) -> list[Tokens]:
            assert prompt.dtype == np.int64
            assert prompt.min() >= 0 and prompt.max() < round_graph.VOCAB
            lengths.append(len(prompt))
            return []

    compare(Recorder(), Recorder(), round_graph.limits(), PLAN)
    assert max(lengths) + ROUNDS * (round_graph.DEPTH + 1) <= round_graph.MAX_LENGTH
    assert len(set(lengths)) > 2


def test_plan_runs_as_the_round_loop_runs_it(tmp_path: Path) -> None:
    """Each prompt in a new state: the prompt is read, then every round."""
    calls: list[Any] = []
    tree = buffers(round_graph.save_bundle(tmp_path / "model"))

    class State:
        def prefill(self, token_ids: Any, start: int, next_tree: TreeBuffers) -> None:
            calls.append(("prefill", token_ids.tolist(), start, next_tree is tree))

        def round(self, verified: TreeBuffers, next_tree: TreeBuffers) -> None:
            calls.append(("round", verified is tree, next_tree is tree))

        def read(self) -> Any:
            calls.append("read")
            return SimpleNamespace(tokens=np.array([len(calls)]))

    rounds = PlanRounds(State, tree)
    assert rounds.answer(np.array([5, 6])) == [[4], [6], [8]]
    assert calls == [("prefill", [5, 6], 0, True), "read", *[("round", True, True), "read"] * ROUNDS]


def test_dtype_that_onnx_runtime_lacks_is_told(tmp_path: Path) -> None:
    """As a graph in bfloat16 on its CPU."""

    def in_bfloat16(graph: RoundGraph) -> None:
        graph.node("Where", ["visible", "hidden_bf16", "seen_bf16"], "unkept")
        for name in ("hidden_bf16", "seen_bf16"):
            graph.constants.append(round_graph.helper.make_tensor(name, TensorProto.BFLOAT16, [], [1.0]))
        graph.output("unkept", TensorProto.BFLOAT16, ["N", 51])

    with pytest.raises(NotImplementedError, match="Where"):
        graph_rounds(tmp_path / "model", in_bfloat16)


@pytest.mark.slow
def test_runtime_and_graph_agree_on_an_exported_model(rigged_heads: Rigged, tmp_path: Path) -> None:
    """The runtime's backend over stand-ins of TensorRT and CUDA, whose tokens are known."""
    from fake_tensorrt import make_plan, open_plan
    from fixed_rounds import export_fixed, fp32_for_tensorrt
    from tiny_models import export, save_rigged

    save_rigged(tmp_path / "model", rigged_heads)
    options = ("--max-length", "200", "--max-tree-nodes", "16", "--top-k", "4")
    path = make_plan(export(tmp_path / "model", tmp_path / "free", *options).bundle, tmp_path / "model.plan")
    backend = open_plan(tmp_path / "free", path).engine.backend
    bundle = export_fixed(tmp_path / "model", tmp_path / "fixed", *options).bundle
    with fp32_for_tensorrt():
        manifest = read_manifest(bundle)
    tree = TreePlan(load_tree(bundle / "tree.json"), manifest.limits).full
    reference = GraphRounds(bundle / "round.onnx", plan_io(manifest, "greedy", 0), manifest.limits, tree, {})
    rounds = PlanRounds(backend.new_state, tree)
    assert compare(rounds, reference, manifest.limits, PLAN).startswith(f"{PROMPTS} of {PROMPTS}")
    published = [token for tokens in reference.answer(np.array([3, 7])) for token in tokens]
    assert published == rigged_heads.answer([7], len(published) + 1)[: len(published)]
    assert len(published) >= ROUNDS
