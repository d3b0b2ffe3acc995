"""medusa-run refuses an engine that is not there, damaged or not its own, in two lines and without a traceback."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import ARTIFACTS
from command_checks import RUN, Commands, check_refused, unchanged

from medusa_engine.runtime.manifest import document_sha256

ASK = ("--prompt-ids", "1,2,3", "--max-new-tokens", "4")


@pytest.fixture
def bundle(chat_bundle: Path, tmp_path: Path) -> Path:
    """A copy of a good bundle, to be damaged."""
    return Path(shutil.copytree(chat_bundle, tmp_path / "bundle"))


def edit_manifest(bundle: Path, edit: Callable[[dict[str, Any]], object], *, seal: bool = True) -> None:
    """Change the manifest; sealed, it looks as if the exporter had written it so."""
    path = bundle / "manifest.json"
    document = json.loads(path.read_text())
    edit(document)
    if seal:
        del document["sha256"]
        document["sha256"] = document_sha256(document)
    path.write_text(json.dumps(document))


def flip_byte(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def test_undamaged_copy_runs(bundle: Path, commands: Commands) -> None:
    with unchanged(bundle):
        answer = json.loads(commands.run("--engine", bundle, *ASK, "--ignore-eos", "--json"))
    assert len(answer["token_ids"]) == 4


def test_engine_path_that_does_not_exist(tmp_path: Path, commands: Commands) -> None:
    commands.run_refuses("--engine", tmp_path / "missing", *ASK, named=[tmp_path / "missing", "no such folder"])


def test_engine_path_longer_than_the_system_allows(commands: Commands) -> None:
    commands.run_refuses("--engine", "e" * 300, *ASK, named=["eee", "too long"])


def test_engine_path_that_is_a_file(bundle: Path, commands: Commands) -> None:
    file = bundle / "weights.bin"
    commands.run_refuses("--engine", file, *ASK, named=[file, "not a bundle folder"])


def test_folder_without_manifest(bundle: Path, commands: Commands) -> None:
    (bundle / "manifest.json").unlink()
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle, "manifest.json"])


@pytest.mark.parametrize("name", ["garbage.plan", "missing.plan"])
def test_plan_that_is_none(name: str, tmp_path: Path, commands: Commands) -> None:
    shutil.copy(ARTIFACTS / "garbage.engine", tmp_path / "garbage.plan")
    commands.run_refuses("--engine", tmp_path / name, *ASK, named=[tmp_path / name])


@pytest.mark.parametrize(
    "text",
    ["", "not JSON", '{"format": "medusa-bundle"', "[]", "null", '{"format": "other"}', "\x00", "[" * 100_000],
    ids=["empty", "text", "cut", "list", "null", "other format", "zero byte", "deep"],
)
def test_manifest_that_is_no_manifest(text: str, bundle: Path, commands: Commands) -> None:
    (bundle / "manifest.json").write_text(text)
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / "manifest.json"])


def test_manifest_that_is_not_utf8(bundle: Path, commands: Commands) -> None:
    (bundle / "manifest.json").write_bytes(b'{"format": "\xff"}')
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / "manifest.json", "UTF-8"])


def test_newer_format_version_is_named_with_the_newest_known(bundle: Path, commands: Commands) -> None:
    edit_manifest(bundle, lambda document: document.update(format_version=4))
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / "manifest.json", "version 4", "newer than 3"])


def test_older_format_version_is_refused(bundle: Path, commands: Commands) -> None:
    edit_manifest(bundle, lambda document: document.update(format_version=1))
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / "manifest.json", "version 1", "older than 3"])


@pytest.mark.parametrize("version", [None, "1", 0, -1, 1.0, True, [1]])
def test_format_version_that_is_none(version: object, bundle: Path, commands: Commands) -> None:
    edit_manifest(bundle, lambda document: document.update(format_version=version))
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / "manifest.json", "format_version"])


@pytest.mark.parametrize("field", ["name", "dtype", "limits", "model", "heads", "tools", "graphs", "files", "policies"])
@pytest.mark.parametrize("value", [None, 7], ids=["null", "number"])
def test_field_of_the_wrong_kind(field: str, value: object, bundle: Path, commands: Commands) -> None:
    edit_manifest(bundle, lambda document: document.update({field: value}))
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / "manifest.json", f'"{field}"'])


@pytest.mark.parametrize("field", ["format_version", "target", "limits.layers", "graphs.round", "trees"])
def test_field_that_is_missing(field: str, bundle: Path, commands: Commands) -> None:
    def edit(document: dict[str, Any]) -> None:
        *outer, last = field.split(".")
        (document[outer[0]] if outer else document).pop(last)

    edit_manifest(bundle, edit)
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / "manifest.json", field, "is missing"])


@pytest.mark.parametrize("value", ["64", 1.5, True, None, 0, -1, 1 << 40, [64]])
@pytest.mark.parametrize("limit", ["cache_rows", "vocab_size"])
def test_limit_that_is_no_size(limit: str, value: object, bundle: Path, commands: Commands) -> None:
    edit_manifest(bundle, lambda document: document["limits"].update({limit: value}))
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / "manifest.json", f"limits.{limit}"])


def test_limits_that_contradict_each_other(bundle: Path, commands: Commands) -> None:
    edit_manifest(bundle, lambda document: document["limits"].update(max_length=1 << 20))
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / "manifest.json", "limits.cache_rows"])


@pytest.mark.parametrize("limit", ["layers", "kv_heads", "cache_rows", "topk", "vocab_size"])
def test_limit_that_is_not_the_graphs(limit: str, bundle: Path, commands: Commands) -> None:
    edit_manifest(bundle, lambda document: document["limits"].update({limit: 90}), seal=False)
    commands.run_refuses("--engine", bundle, *ASK, "--no-verify", named=[bundle / "manifest.json", "changed"])


@pytest.mark.parametrize("name", ["weights.bin", "round.onnx", "step.onnx", "tokenizer.json", "tree.json"])
@pytest.mark.parametrize("plain", [(), ("--no-speculation",)], ids=["rounds", "steps"])
def test_missing_file(name: str, plain: tuple[str, ...], bundle: Path, commands: Commands) -> None:
    (bundle / name).unlink()
    commands.run_refuses("--engine", bundle, *ASK, *plain, named=[bundle / name, "missing"])


@pytest.mark.parametrize("name", ["weights.bin", "round.onnx", "tokenizer.json"])
@pytest.mark.parametrize("options", [(), ("--no-verify",)], ids=["verified", "not verified"])
def test_file_cut_short(name: str, options: tuple[str, ...], bundle: Path, commands: Commands) -> None:
    data = (bundle / name).read_bytes()
    (bundle / name).write_bytes(data[: len(data) // 2])
    commands.run_refuses("--engine", bundle, *ASK, *options, named=[bundle / name, "cut short", str(len(data))])


def test_file_with_bytes_added(bundle: Path, commands: Commands) -> None:
    with (bundle / "weights.bin").open("ab") as file:
        file.write(b"\0")
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / "weights.bin", "too long"])


@pytest.mark.parametrize("offset", [0, -1])
@pytest.mark.parametrize(
    "name", ["weights.bin", "round.onnx", "step.onnx", "tokenizer.json", "generation_config.json", "tree.json"]
)
def test_one_changed_byte(name: str, offset: int, bundle: Path, commands: Commands) -> None:
    flip_byte(bundle / name, offset)
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / name, "changed"])


@pytest.mark.parametrize("name", ["round.onnx", "tokenizer.json", "tree.json", "generation_config.json"])
def test_damage_found_without_verification(name: str, bundle: Path, commands: Commands) -> None:
    path = bundle / name
    path.write_bytes(b"\xff" * path.stat().st_size)
    commands.run_refuses("--engine", bundle, *ASK, "--no-verify", named=[path])


@pytest.mark.parametrize("kind", ["graphs", "files"])
@pytest.mark.parametrize(
    "name", ["../bundle/round.onnx", "/etc/hostname", "..", "", "a\\b", "sub/round.onnx", "a\0b", "a" * 300]
)
def test_file_name_that_leads_out_of_the_bundle(kind: str, name: str, bundle: Path, commands: Commands) -> None:
    def edit(document: dict[str, Any]) -> None:
        if kind == "graphs":
            document["graphs"]["round"] = name
        else:
            document["files"][name] = document["files"]["round.onnx"]

    edit_manifest(bundle, edit)
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / "manifest.json", "plain name"])


@pytest.mark.parametrize("name", ["weights.bin", "round.onnx", "step.onnx", "tree.json", "generation_config.json"])
def test_file_that_would_be_used_unverified(name: str, bundle: Path, commands: Commands) -> None:
    edit_manifest(bundle, lambda document: document["files"].pop(name))
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / "manifest.json", name])


@pytest.mark.parametrize("facts", [None, {}, {"bytes": "1", "sha256": ""}, {"bytes": 1}])
def test_file_entry_without_size_or_hash(facts: object, bundle: Path, commands: Commands) -> None:
    edit_manifest(bundle, lambda document: document["files"].update({"weights.bin": facts}))
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / "manifest.json", "files.weights.bin"])


def test_process_ends_in_two_lines_too(bundle: Path) -> None:
    flip_byte(bundle / "weights.bin", 100)
    ended = subprocess.run([*RUN, "--engine", bundle, *ASK], capture_output=True, text=True, check=False)
    check_refused(ended.returncode, ended.stderr, "medusa-run", bundle / "weights.bin", "changed")
    assert ended.stdout == ""


# Acceptance policies


@pytest.mark.parametrize("policies", [[], ["sample"], ["greedy", "best"], "greedy", ["greedy", 1]])
def test_policies_that_no_runtime_knows(policies: object, bundle: Path, commands: Commands) -> None:
    edit_manifest(bundle, lambda document: document.update(policies=policies))
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / "manifest.json", '"policies"'])


def test_policy_without_its_graphs(bundle: Path, commands: Commands) -> None:
    edit_manifest(bundle, lambda document: document.update(policies=["greedy", "sample"]))
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / "manifest.json", "graphs.round.sample"])
