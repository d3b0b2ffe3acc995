"""A plan is refused before it is deserialised, by what differs and with the command that mends it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnxruntime
import pytest
from checkpoints import ARTIFACTS
from command_checks import Commands
from fake_cuda import FakeCudart, Properties, cudaError_t
from fake_tensorrt import make_plan, open_plan

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import document_sha256, file_sha256
from medusa_engine.runtime.plan import files_folder, read_plan, sidecar_path, write_plan
from medusa_engine.runtime.plan_fit import check_library
from medusa_engine.runtime.tensorrt_library import TensorRtLibrary

if TYPE_CHECKING:
    from tiny_models import Exported

ASK = ("--prompt-ids", "1,2,3", "--max-new-tokens", "4")
GARBAGE = ARTIFACTS / "garbage.engine"


@pytest.fixture
def path(rigged_96: Exported, tmp_path: Path) -> Path:
    return make_plan(rigged_96.bundle, tmp_path / "a.plan")


def edit(path: Path, change: Callable[[dict[str, Any]], object], *, seal: bool = True) -> None:
    """Change the sidecar; sealed, it looks as if the build had written it so."""
    sidecar = sidecar_path(path)
    document = json.loads(sidecar.read_text())
    change(document)
    if seal:
        del document["sha256"]
        document["sha256"] = document_sha256(document)
    sidecar.write_text(json.dumps(document))


def refused(act: Callable[[], object], *named: str | Path) -> UserError:
    with pytest.raises(UserError) as caught:
        act()
    for text in named:
        assert str(text) in caught.value.problem
    assert "\n" not in caught.value.problem + caught.value.hint
    return caught.value


def test_a_sidecar_is_read_as_it_was_written(path: Path) -> None:
    plan = read_plan(path)
    document = json.loads(sidecar_path(path).read_text())
    assert (document["format"], document["format_version"]) == ("medusa-plan", 1)
    assert json.loads(json.dumps(plan.document())) == document
    write_plan(path, plan)
    assert read_plan(path) == plan


# What is not there


@pytest.mark.parametrize("command", ["run", "serve"])
def test_garbage_without_a_sidecar_is_refused(tmp_path: Path, commands: Commands, command: str) -> None:
    shutil.copy(GARBAGE, tmp_path / "garbage.plan")
    if command == "run":
        named = [tmp_path / "garbage.plan", "garbage.plan.json"]
        commands.run_refuses("--engine", tmp_path / "garbage.plan", *ASK, named=named)
    else:
        pytest.importorskip("uvicorn", reason="needs uvicorn")
        from medusa_engine.runtime.serve.cli import main

        assert main(["--engine", str(tmp_path / "garbage.plan")]) == 1


def test_a_plan_that_is_not_there_or_a_folder(tmp_path: Path) -> None:
    error = refused(lambda: Engine.open(tmp_path / "no.plan"), tmp_path / "no.plan", "no such file")
    assert "medusa-build" in error.hint
    (tmp_path / "folder.plan").mkdir()
    refused(lambda: Engine.open(tmp_path / "folder.plan"), tmp_path / "folder.plan")


@pytest.mark.parametrize("name", ["tree.json", "generation_config.json"])
def test_a_file_beside_it_that_is_missing_or_changed(path: Path, commands: Commands, name: str) -> None:
    file = files_folder(path) / name
    data = file.read_bytes()
    file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    commands.run_refuses("--engine", path, *ASK, named=[file, "changed since the build"])
    file.unlink()
    error = refused(lambda: Engine.open(path), file, "missing")
    assert f"-o {path} --flavor tensorrt-rtx --compute-capability 8.9" in error.hint and "copy" in error.hint


@pytest.mark.parametrize("data", [GARBAGE, b"", b"a plan of the stand-iN"], ids=["garbage", "empty", "changed"])
def test_a_plan_that_is_not_the_one_of_the_sidecar(path: Path, commands: Commands, data: Path | bytes) -> None:
    path.write_bytes(data.read_bytes() if isinstance(data, Path) else data)
    commands.run_refuses("--engine", path, *ASK, named=[path])
    assert "medusa-build engines/" in refused(lambda: Engine.open(path), path).hint


# What does not fit


def test_a_changed_sidecar(path: Path) -> None:
    edit(path, lambda document: document.update(compaction="plugin"), seal=False)
    refused(lambda: Engine.open(path), sidecar_path(path), "changed since the build")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("flavor", "tensorflow"),
        ("library_version", 1),
        ("compute_capability", 8.9),
        ("compute_capability", "eight"),
        ("acceptance", "rejection"),
        ("graph", "round.sample"),
        ("compaction", None),
        ("builder", {}),
        ("profiles", []),
        ("io", {}),
        ("io", [{"name": "input_ids", "mode": "in", "dtype": "int64", "shape": [1, -1]}]),
        ("io", [{"name": "input_ids", "mode": "input", "dtype": "float8", "shape": [1, -1]}]),
        ("io", [{"name": "input_ids", "mode": "input", "dtype": "int64", "shape": [1, -2]}]),
        ("plan", {"bytes": "4"}),
        ("files", {}),
        ("files", {"../x": {"bytes": 1, "sha256": ""}}),
        ("bundle", {}),
    ],
)
def test_a_field_of_another_kind_is_named(path: Path, name: str, value: Any) -> None:
    edit(path, lambda document: document.update({name: value}))
    error = refused(lambda: read_plan(path), sidecar_path(path))
    assert name in error.problem or name == "files"
    assert "medusa-build" in error.hint


@pytest.mark.parametrize(
    "name", ["format_version", "flavor", "builder.version_compatible", "io.0.dtype", "bundle.target"]
)
def test_a_field_that_is_missing_is_named(path: Path, name: str) -> None:
    def drop(document: Any) -> None:
        *outer, last = name.split(".")
        for part in outer:
            document = document[int(part) if part.isdigit() else part]
        document.pop(last)
        if outer == ["bundle"]:
            document["sha256"] = document_sha256({key: value for key, value in document.items() if key != "sha256"})

    edit(path, drop)
    error = refused(lambda: read_plan(path), sidecar_path(path))
    assert "is missing" in error.problem and name.split(".")[-1] in error.problem


def test_profiles_that_are_not_those_of_the_bundle(path: Path) -> None:
    for index, key, value in ((0, "rows", [1, 2, 3]), (0, "logit_rows", [24, 24]), (1, "rows", [2, 4, 8])):

        def change(document: dict[str, Any], place: Any = (index, key, value)) -> None:
            document["profiles"][place[0]][place[1]] = place[2]

        original = sidecar_path(path).read_text()
        edit(path, change)
        refused(lambda: read_plan(path), "profiles.")
        sidecar_path(path).write_text(original)


def test_another_format_version(path: Path) -> None:
    edit(path, lambda document: document.update(format_version=2))
    refused(lambda: read_plan(path), "format version 2 is newer than 1")


def test_another_library_version_is_refused_with_both(path: Path, rigged_96: Exported) -> None:
    error = refused(
        lambda: open_plan(rigged_96.bundle, path, __version__="1.8.0.1"), path, "1.7.1.116", "tensorrt_rtx here is 1.8"
    )
    assert "medusa-build engines/" in error.hint


def test_a_version_compatible_plan_runs_on_later_versions_of_its_major_one(path: Path) -> None:
    edit(path, lambda document: document["builder"].update(version_compatible=True))
    plan = read_plan(path)
    for version in ("1.7.1.116", "1.7.2.0", "1.10.0"):
        check_library(path, plan, module="tensorrt_lean", version=version)
    for version in ("1.7.0.999", "2.0.0"):
        error = refused(lambda v=version: check_library(path, plan, module="tensorrt_lean", version=v), version)  # type: ignore[misc]
        assert "--version-compatible" in error.hint


def test_another_gpu_is_refused_with_both_capabilities(
    path: Path, rigged_96: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Properties, "major", 12)
    monkeypatch.setattr(Properties, "minor", 0)
    error = refused(
        lambda: open_plan(rigged_96.bundle, path), path, "built for compute capability 8.9", "Imaginary GPU has 12.0"
    )
    assert "--compute-capability 12.0" in error.hint


def test_no_driver_is_said_before_the_plan_is_deserialised(path: Path, rigged_96: Exported) -> None:
    cudart = FakeCudart()
    cudart.fail["cudaGetDeviceCount"] = cudaError_t.cudaErrorInsufficientDriver
    refused(lambda: open_plan(rigged_96.bundle, path, cudart, Runtime=None), "no NVIDIA driver")


def test_a_library_that_is_not_installed_is_said(path: Path) -> None:
    edit(path, lambda document: document.update(flavor="tensorrt"))
    try:
        import tensorrt  # noqa: F401
    except ImportError:
        error = refused(lambda: TensorRtLibrary(path, read_plan(path)), path, "tensorrt")
        assert error.hint == "install it: pip install '.[tensorrt]' in a clone of medusa-engine"


def test_a_plan_that_deserialises_to_none_is_refused(path: Path, rigged_96: Exported) -> None:
    seal_garbage(path)
    error = refused(lambda: open_plan(rigged_96.bundle, path), path, "does not take it as a plan: it is garbage")
    assert "medusa-build" in error.hint


def test_what_tensorrt_rtx_itself_says_of_garbage_is_handed_on(path: Path) -> None:
    module = pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx")
    seal_garbage(path)
    edit(path, lambda document: document.update(library_version=module.__version__))
    library = TensorRtLibrary(path, read_plan(path))
    error = refused(library.deserialize, path, "tensorrt_rtx", "does not take it as a plan")
    assert "erialization" in error.problem


def seal_garbage(path: Path) -> None:
    path.write_bytes(GARBAGE.read_bytes())
    facts = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    edit(path, lambda document: document.update(plan=facts))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda io: io.pop(0), "input_ids"),
        (lambda io: io[1].update(dtype="int32"), "position_ids"),
        (lambda io: io.append({"name": "more", "mode": "input", "dtype": "int64", "shape": [1]}), "more"),
    ],
)
def test_inputs_and_outputs_that_are_not_those_of_the_sidecar(
    path: Path, rigged_96: Exported, change: Callable[[list[dict[str, Any]]], object], named: str
) -> None:
    edit(path, lambda document: change(document["io"]))
    refused(lambda: open_plan(rigged_96.bundle, path), path, named, "not what the sidecar says")


def test_a_provider_is_for_bundles(path: Path, rigged_96: Exported, commands: Commands) -> None:
    commands.run_refuses("--engine", path, *ASK, "--provider", "cuda", named=[path, "provider cuda"])
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        named = ["no CUDAExecutionProvider"]
        commands.run_refuses("--engine", rigged_96.bundle, *ASK, "--provider", "cuda", named=named)
        assert "onnxruntime-gpu" in refused(lambda: Engine.open(rigged_96.bundle, provider="cuda")).hint
    refused(lambda: Engine.open(rigged_96.bundle, provider="tpu"), "tpu")
    given = commands.run("--engine", rigged_96.bundle, *ASK, "--provider", "cpu")
    assert given == commands.run("--engine", rigged_96.bundle, *ASK)
