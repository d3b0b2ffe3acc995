"""medusa-build refuses graphs that are no round, in two lines that name what is wrong with them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import round_graph
from command_checks import Commands, unchanged
from onnx import TensorProto
from round_graph import RoundGraph

DATA = Path(__file__).resolve().parents[1] / "data"
AHEAD = ("--flavor", "tensorrt-rtx", "--compute-capability", "8.9")


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Path]:
    """Where no plan may be left, in whole or in part."""
    folder = tmp_path / "out"
    folder.mkdir()
    with unchanged(folder):
        yield folder / "model.plan"


def wrong(folder: Path, change: round_graph.Change) -> Path:
    return round_graph.save_bundle(folder / "wrong", change=change)


def add_output(graph: RoundGraph, name: str, kind: int = TensorProto.INT64, shape: tuple[int, ...] = (1,)) -> None:
    graph.output(name, kind, shape)


def unused_input(graph: RoundGraph) -> None:
    graph.input("uniforms", TensorProto.FLOAT, [51])


def input_of_dead_nodes(graph: RoundGraph) -> None:
    graph.input("uniforms", TensorProto.FLOAT, [51])
    graph.node("Neg", ["uniforms"], "dead")


def shape_tensor(graph: RoundGraph) -> None:
    graph.nodes[:] = [node for node in graph.nodes if node.output[0] != "next_token_budget"]
    kept = graph.node("Slice", ["row", "zero", "token_budget", "zero"], "kept")  # token_budget says how long it is
    graph.node("ReduceSum", [kept], "next_token_budget", keepdims=1)


def missing_input(graph: RoundGraph) -> None:
    """`finished` became a constant."""
    graph.inputs[:] = [value for value in graph.inputs if value.name != "finished"]
    graph.constant("finished", np.array([False]))


def missing_output(graph: RoundGraph) -> None:
    graph.outputs[:] = [value for value in graph.outputs if value.name != "next_past_length"]


def wrong_dtype(graph: RoundGraph) -> None:
    graph.outputs[:] = [value for value in graph.outputs if value.name != "accepted_count"]
    rename(graph, "accepted_count", "count64")
    graph.node("Cast", ["count64"], "accepted_count", to=TensorProto.FLOAT)
    add_output(graph, "accepted_count", TensorProto.FLOAT)


def wrong_shape(graph: RoundGraph) -> None:
    (value,) = (value for value in graph.inputs if value.name == "tree_indices")
    value.type.tensor_type.shape.dim[0].dim_value = 7


def rename(graph: RoundGraph, old: str, new: str) -> None:
    for node in graph.nodes:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]


def shadow(graph: RoundGraph, name: str) -> None:
    """Let another node make what this name stands for."""
    for node in graph.nodes:
        node.output[:] = [f"{name}.before" if output == name else output for output in node.output]


def unsupported_operator(graph: RoundGraph) -> None:
    graph.node("Unique", ["stop_ids"], "distinct")
    shadow(graph, "stops")
    graph.node("ReduceSum", ["distinct"], "stops", keepdims=1)


def shapes_that_do_not_fit(graph: RoundGraph) -> None:
    graph.constant("narrow", np.zeros((7, 3), np.float16))
    graph.node("MatMul", ["chosen", "narrow"], "misfit")


def too_many_ranks(graph: RoundGraph) -> None:
    """The builder, not the parser, refuses it."""
    graph.constant("wide", np.zeros((1, 6000), np.float32))
    graph.constant("most", np.array([5000]))
    budget = graph.node("Cast", ["token_budget"], "as_float", to=TensorProto.FLOAT)
    spread = graph.node("Add", ["wide", budget], "spread")
    graph.nodes.append(round_graph.helper.make_node("TopK", [spread, "most"], ["top", "ranks"], name="node_ranks"))
    shadow(graph, "nothing")
    graph.node("ReduceSum", ["ranks"], "total", keepdims=0)
    graph.node("Mul", ["total", "nothing.before"], "nothing")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (unused_input, ["nothing uses", "uniforms"]),
        (input_of_dead_nodes, ["nothing uses", "uniforms"]),
        (shape_tensor, ["token_budget", "shape tensor"]),
        (missing_input, ["the input finished is missing"]),
        (missing_output, ["the output next_past_length is missing"]),
        (wrong_dtype, ["output accepted_count float32 [1] should be output accepted_count int64 [1]"]),
        (wrong_shape, ["input tree_indices int64 [7] should be input tree_indices int64 [8]"]),
        (unsupported_operator, ["node node_distinct (Unique", "not supported"]),
        (
            shapes_that_do_not_fit,
            [
                "node_misfit (MatMul of [chosen -> (1, -1, 32)[HALF]]",
                "[narrow -> (7, 3)[HALF]]): node_misfit: last dimension of",
            ],
        ),
        (too_many_ranks, ["node_ranks", "TopK of [spread -> (1, 6000)[FLOAT]]", "3840"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_graph_that_is_no_round(
    change: round_graph.Change, named: list[str], tmp_path: Path, output: Path, commands: Commands
) -> None:
    bundle = wrong(tmp_path, change)
    commands.build_refuses(bundle, *AHEAD, "-o", output, named=named)


def test_bytes_that_are_no_graph(tmp_path: Path, output: Path, commands: Commands) -> None:
    class Garbage(RoundGraph):
        def save(self, path: Path) -> None:
            shutil.copy(DATA / "artifacts" / "garbage.engine", path)

    graph = pytest.MonkeyPatch()
    with graph.context() as patch:
        patch.setattr(round_graph, "RoundGraph", Garbage)
        bundle = round_graph.save_bundle(tmp_path / "garbage")
    commands.build_refuses(bundle, *AHEAD, "-o", output, named=[bundle / "round.onnx", "TensorRT-RTX"])


def test_verbose_lists_every_refusal(tmp_path: Path, output: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from medusa_engine.exporter.build_cli import main

    assert main([str(wrong(tmp_path, unsupported_operator)), *AHEAD, "-o", str(output), "--verbose"]) == 1
    errors = capfd.readouterr().err
    assert "Parsing node: node_visible [Or]" in errors
    assert "checkUnique" in errors
