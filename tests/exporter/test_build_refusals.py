"""medusa-build refuses what cannot become a plan, in two lines, and leaves what is there."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import round_graph
from command_checks import Commands, unchanged

from medusa_engine.exporter import engine, plan_build
from medusa_engine.exporter.plan_build import Built
from medusa_engine.runtime.manifest import document_sha256

DATA = Path(__file__).resolve().parents[1] / "data"
AHEAD = ("--flavor", "tensorrt-rtx", "--compute-capability", "8.9")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return round_graph.save_bundle(tmp_path_factory.mktemp("handmade") / "model")


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Path]:
    """Where no plan may be left, in whole or in part."""
    folder = tmp_path / "out"
    folder.mkdir()
    with unchanged(folder):
        yield folder / "model.plan"


def no_gpu() -> None:
    return None


# The bundle


def test_folder_that_is_not_there(tmp_path: Path, output: Path, commands: Commands) -> None:
    commands.build_refuses(tmp_path / "gone", *AHEAD, "-o", output, named=[tmp_path / "gone", "no such folder"])


@pytest.mark.parametrize("kind", ["empty folder", "file"])
def test_what_is_no_bundle(kind: str, tmp_path: Path, output: Path, commands: Commands) -> None:
    source = tmp_path / "thing"
    if kind == "file":
        shutil.copy(DATA / "artifacts" / "garbage.engine", source)
    else:
        source.mkdir()
    commands.build_refuses(source, *AHEAD, "-o", output, named=[source, "bundle"])


def test_bundle_for_onnx_runtime(bundle: Path, tmp_path: Path, output: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from medusa_engine.exporter.build_cli import main

    copy = edited_manifest(
        bundle, tmp_path / "cpu", target="onnxruntime", dtype="float32", weights="float32", graphs=None
    )
    assert main([str(copy), *AHEAD, "-o", str(output)]) == 1
    problem, hint = capfd.readouterr().err.splitlines()
    assert str(copy) in problem and "onnxruntime" in problem
    assert "--target tensorrt --precision fp16" in hint


def test_policy_that_was_not_exported(bundle: Path, output: Path, commands: Commands) -> None:
    commands.build_refuses(
        bundle, *AHEAD, "-o", output, "--acceptance", "sample", named=[bundle, "--acceptance sample"]
    )


def test_graph_changed_since_the_export(bundle: Path, tmp_path: Path, output: Path, commands: Commands) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "changed"))
    graph = copy / "round.onnx"
    data = bytearray(graph.read_bytes())
    data[-1] ^= 1
    graph.write_bytes(data)
    commands.build_refuses(copy, *AHEAD, "-o", output, named=[graph, "changed since the export"])


def edited_manifest(bundle: Path, copy: Path, **fields: object) -> Path:
    shutil.copytree(bundle, copy)
    path = copy / "manifest.json"
    document = json.loads(path.read_text())
    del document["sha256"]
    if "graphs" in fields:
        fields["graphs"] = dict.fromkeys(("round", "step"), "round.onnx")
    document |= fields
    path.write_text(json.dumps(document | {"sha256": document_sha256(document)}))
    return copy


# Options


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--compute-capability", "9.0"), ["9.0", "TensorRT-RTX"]),
        (("--compute-capability", "8.7"), ["8.7", "TensorRT-RTX"]),
        (("--compute-capability", "89"), ["'89'", "like 8.9"]),
        (("--compute-capability", "sm_89"), ["'sm_89'"]),
        (("--compute-capability", ""), ["''"]),
        (("--max-prefill-chunk", "0"), ["--max-prefill-chunk is 0"]),
        (("--max-prefill-chunk", "513"), ["--max-prefill-chunk is 513"]),
        (("--workspace-mib", "0"), ["--workspace-mib is 0"]),
        (("--workspace-mib", "-5"), ["--workspace-mib is -5"]),
        (("--version-compatible",), ["--version-compatible", "lean runtime"]),
    ],
)
def test_option_out_of_range(
    options: tuple[str, ...], named: list[str], bundle: Path, output: Path, commands: Commands
) -> None:
    commands.build_refuses(bundle, *AHEAD, "-o", output, *options, named=named)


def test_capability_refusal_lists_those_that_are_built_for(
    bundle: Path, output: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from medusa_engine.exporter.build_cli import main

    assert main([str(bundle), *AHEAD, "-o", str(output), "--compute-capability", "9.0"]) == 1
    assert "7.5, 8.0, 8.6, 8.9, 12.0, 12.1" in capfd.readouterr().err.splitlines()[1]


def test_no_gpu_and_no_capability(
    bundle: Path, output: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "gpu_capability", no_gpu)
    commands.build_refuses(bundle, "--flavor", "tensorrt-rtx", "-o", output, named=["no GPU here"])


def test_bfloat16_below_8_0(bundle: Path, tmp_path: Path, output: Path, commands: Commands) -> None:
    copy = edited_manifest(bundle, tmp_path / "bf16", dtype="bfloat16", weights="bfloat16")
    commands.build_refuses(copy, *AHEAD, "-o", output, "--compute-capability", "7.5", named=["7.5", "bfloat16"])


@pytest.mark.parametrize("flavor", ["tensorrt", "tensorrt-rtx", None])
def test_library_that_is_not_installed(
    flavor: str | None,
    bundle: Path,
    output: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from medusa_engine.exporter import builder_library
    from medusa_engine.exporter.build_cli import main

    monkeypatch.setattr(builder_library, "find_spec", lambda _name: None)
    options = () if flavor is None else ("--flavor", flavor)
    assert main([str(bundle), *options, "--compute-capability", "8.9", "-o", str(output)]) == 1
    problem, hint = capfd.readouterr().err.splitlines()
    assert "installed" in problem
    assert f"pip install '.[{flavor or 'tensorrt-rtx'}]'" in hint


def test_library_that_does_not_load(
    bundle: Path, output: Path, tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the full library's package on the index does where its own libraries are missing."""
    (tmp_path / "tensorrt.py").write_text("raise ImportError('libnvinfer.so.11: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    commands.build_refuses(
        bundle, "--flavor", "tensorrt", "--compute-capability", "8.9", "-o", output, named=["tensorrt", "libnvinfer.so"]
    )


def test_module_that_cannot_build(
    bundle: Path, output: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = ModuleType("tensorrt")
    stub.__spec__ = importlib.util.spec_from_loader("tensorrt", None)
    monkeypatch.setitem(sys.modules, "tensorrt", stub)
    commands.build_refuses(bundle, "--flavor", "tensorrt", "-o", output, named=["tensorrt", "no Builder"])


# The output


@pytest.mark.parametrize(
    ("name", "named"),
    [("model.engine", ["ends in .plan"]), (".plan", ["ends in .plan"]), ("gone/model.plan", ["does not exist"])],
)
def test_output_that_cannot_be(name: str, named: list[str], bundle: Path, output: Path, commands: Commands) -> None:
    path = output.parent / name
    commands.build_refuses(bundle, *AHEAD, "-o", path, named=[path, *named])


def test_output_below_a_file(bundle: Path, tmp_path: Path, output: Path, commands: Commands) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "model.plan"
    commands.build_refuses(bundle, *AHEAD, "-o", path, named=[path, "not a folder"])


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["plain", "force"])
@pytest.mark.parametrize("part", ["model.plan", "model.plan.json", "model.plan.files"])
def test_files_of_others_are_never_replaced(
    part: str, force: tuple[str, ...], bundle: Path, tmp_path: Path, commands: Commands
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    if part.endswith(".files"):
        (folder / part).mkdir()
        (folder / part / "chapter_1.txt").write_text("It was a dark and stormy night.")
    else:
        (folder / part).write_text('{"format": "something else"}')
    with unchanged(folder):
        commands.build_refuses(
            bundle, *AHEAD, *force, "-o", folder / "model.plan", named=[folder / part, "no plan of medusa-build"]
        )


def test_full_disk_leaves_the_plan_that_was_there(
    bundle: Path, tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.plan"
    monkeypatch.setattr(plan_build, "_build", lambda *_arguments: np.zeros(200_000, dtype=np.uint8))
    commands.build(bundle, *AHEAD, "-o", path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # a larger file fails as it does on a full disk
    try:
        with unchanged(tmp_path):
            commands.build_refuses(bundle, *AHEAD, "-o", path, "--force", named=[path, "cannot write"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_plan_that_fails_its_self_test_is_not_kept(
    bundle: Path, tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a GPU of that capability, played here: what is no plan does not run."""
    path = tmp_path / "model.plan"
    built = Built(np.zeros(1000, dtype=np.uint8), "fused", ())
    monkeypatch.setattr(engine, "build_network", lambda *_arguments: built)
    commands.build(bundle, *AHEAD, "-o", path)
    monkeypatch.setattr(engine, "gpu_capability", lambda: "8.9")
    with unchanged(tmp_path):
        commands.build_refuses(bundle, *AHEAD, "-o", path, "--force", named=["no NVIDIA driver or GPU"])
    assert os.listdir(tmp_path)
