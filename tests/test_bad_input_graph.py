"""medusa-run refuses graphs that are damaged or read other files, though the manifest vouches for them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from bundle_edits import edit_manifest
from checkpoints import ARTIFACTS
from command_checks import Commands

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError

ASK = ("--prompt-ids", "1,2,3", "--max-new-tokens", "4")


@pytest.fixture
def bundle(chat_bundle: Path, tmp_path: Path) -> Path:
    """A copy of a good bundle, to be damaged."""
    return Path(shutil.copytree(chat_bundle, tmp_path / "bundle"))


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("onnx_ext_dotdot.onnx", ["../../../../etc/hostname", "not in weights.bin"]),
        ("onnx_ext_missing.onnx", ["not_there.data", "not in weights.bin"]),
    ],
)
def test_graph_whose_weights_lie_elsewhere(name: str, named: list[str], bundle: Path, commands: Commands) -> None:
    shutil.copy(ARTIFACTS / name, bundle / "round.onnx")
    edit_manifest(bundle)
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / "round.onnx", *named])


def external_tensor(location: str) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name="far", dims=[1], data_type=onnx.TensorProto.FLOAT)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


def in_initializer(model: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    model.graph.initializer.append(tensor)


def in_constant(model: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    model.graph.node.append(onnx.helper.make_node("Constant", [], ["far"], value=tensor))


def in_branch(model: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    branch = onnx.helper.make_graph([], "branch", [], [], initializer=[tensor])
    model.graph.node.append(onnx.helper.make_node("If", ["never"], [], then_branch=branch, else_branch=branch))


def in_function(model: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    model.functions[0].node.append(onnx.helper.make_node("Constant", [], ["far"], value=tensor))


def in_sparse(model: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    model.graph.sparse_initializer.append(onnx.SparseTensorProto(values=tensor))


@pytest.mark.parametrize("place", [in_initializer, in_constant, in_branch, in_function, in_sparse])
@pytest.mark.parametrize("location", ["../weights.bin", "/etc/hostname", "tree.json", "..\\weights.bin", ""])
def test_tensor_anywhere_in_a_graph_that_names_another_file(
    place: Callable[[onnx.ModelProto, onnx.TensorProto], None], location: str, bundle: Path
) -> None:
    model = onnx.load(bundle / "round.onnx", load_external_data=False)
    place(model, external_tensor(location))
    (bundle / "round.onnx").write_bytes(model.SerializeToString())
    edit_manifest(bundle)
    engine = Engine.open(bundle, threads=1)
    with pytest.raises(UserError, match=r"its weights lie in .*, not in weights\.bin") as error:
        engine.load(speculation=True)
    assert str(bundle / "round.onnx") in error.value.problem


def by_other_graph(bundle: Path) -> None:
    shutil.copy(bundle / "step.onnx", bundle / "round.onnx")


def without_an_output(bundle: Path) -> None:
    model = onnx.load(bundle / "round.onnx", load_external_data=False)
    del model.graph.output[0]
    (bundle / "round.onnx").write_bytes(model.SerializeToString())


def by_garbage(bundle: Path) -> None:
    (bundle / "round.onnx").write_bytes(b"\xff" * 500)


def by_nothing(bundle: Path) -> None:
    (bundle / "round.onnx").write_bytes(b"")


def cut_short(bundle: Path) -> None:
    data = (bundle / "round.onnx").read_bytes()
    (bundle / "round.onnx").write_bytes(data[: len(data) // 2])


def over_fewer_weights(bundle: Path) -> None:
    os.truncate(bundle / "weights.bin", 50_000)


@pytest.mark.parametrize(
    "replaced", [by_other_graph, without_an_output, by_garbage, by_nothing, cut_short, over_fewer_weights]
)
def test_graph_replaced_and_the_manifest_sealed_again(
    replaced: Callable[[Path], None], bundle: Path, commands: Commands
) -> None:
    replaced(bundle)
    edit_manifest(bundle)
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / "round.onnx"])


@pytest.mark.parametrize(
    "limits",
    [{"cache_rows": 90}, {"heads": 3, "cache_rows": 68}, {"layers": 7}, {"kv_heads": 1}, {"head_dim": 4}],
    ids=str,
)
def test_limits_that_are_not_the_graphs(limits: dict[str, Any], bundle: Path, commands: Commands) -> None:
    edit_manifest(bundle, lambda document: document["limits"].update(limits))
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / "round.onnx"])


@pytest.mark.parametrize("limits", [{"layers": 1 << 30}, {"cache_rows": 1 << 30, "layers": 1 << 20}], ids=str)
def test_limits_of_a_cache_that_no_machine_has(limits: dict[str, Any], bundle: Path, commands: Commands) -> None:
    edit_manifest(bundle, lambda document: document["limits"].update(limits))
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / "manifest.json", "limits", "cache"])


def test_graph_in_another_format_of_onnx_runtime(bundle: Path, commands: Commands) -> None:
    (bundle / "round.onnx").rename(bundle / "round.ort")

    def edit(document: dict[str, Any]) -> None:
        document["graphs"]["round"] = "round.ort"
        document["files"]["round.ort"] = document["files"].pop("round.onnx")

    edit_manifest(bundle, edit)
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / "manifest.json", "graphs.round"])


@pytest.mark.parametrize("name", ["weights.bin", "round.onnx", "tokenizer.json", "tree.json"])
def test_link_out_of_the_bundle(name: str, bundle: Path, commands: Commands) -> None:
    (bundle / name).rename(bundle.parent / name)
    (bundle / name).symlink_to(f"../{name}")
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / name, "leads out"])


def test_bundle_in_the_cache_of_the_hub(chat_bundle: Path, tmp_path: Path, commands: Commands) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "12ab", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for index, file in enumerate(chat_bundle.iterdir()):
        shutil.copy(file, blobs / str(index))
        (snapshot / file.name).symlink_to(f"../../blobs/{index}")
    commands.run("--engine", snapshot, *ASK)
