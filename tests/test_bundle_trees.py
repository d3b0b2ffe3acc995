"""A bundle of several trees: how it is exported, listed and checked, and what medusa-run says of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import save_llama
from command_checks import Commands

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.manifest import document_sha256, read_manifest
from medusa_engine.runtime.tree import load_tree

TREES = {"first": [[0], [1], [0, 0]], "second": [[0], [0, 0]], "third": [[1], [0]]}
SIZES = ("--untrained-heads", "2", "--top-k", "4", "--max-tree-nodes", "8", "--max-length", "128")
ASK = ("--prompt-ids", "1,2,3", "--max-new-tokens", "60", "--ignore-eos")


def tree_options(folder: Path) -> list[str | Path]:
    options: list[str | Path] = []
    for name, paths in TREES.items():
        (folder / f"{name}.json").write_text(json.dumps(paths))
        options += ["--tree", folder / f"{name}.json"]
    return options


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of three trees."""
    from medusa_engine.exporter.cli import main as medusa_export

    folder = tmp_path_factory.mktemp("trees")
    options = ("--model", save_llama(folder / "llama"), *tree_options(folder), "-o", folder / "bundle", *SIZES)
    assert medusa_export([str(option) for option in options]) == 0
    return folder / "bundle"


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(exported, tmp_path / "bundle"))


def edit_manifest(bundle: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = bundle / "manifest.json"
    document = json.loads(path.read_text())
    edit(document)
    del document["sha256"]
    path.write_text(json.dumps(document | {"sha256": document_sha256(document)}))


def test_every_tree_is_a_file_that_the_manifest_lists_in_the_order_given(exported: Path) -> None:
    manifest = read_manifest(exported)
    assert manifest.trees == ("tree.json", "tree.2.json", "tree.3.json")
    assert set(manifest.trees) < set(manifest.files)
    assert [load_tree(exported / file).name for file in manifest.trees] == list(TREES)
    engine = Engine.open(exported)
    assert [tree.name for tree in engine.trees] == list(TREES)
    assert {tree.name: sorted(map(list, tree.paths)) for tree in engine.trees} == {
        name: sorted(paths) for name, paths in TREES.items()
    }
    assert engine.tree is engine.trees[0]


def test_answers_change_between_the_trees_and_say_so(
    exported: Path, commands: Commands, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = json.loads(commands.run("--engine", exported, *ASK, "--compare", "--json"))
    assert [way["way"] for way in answer["compared"]] == ["plain", *TREES, "adaptive"]
    assert all(way["same_ids"] for way in answer["compared"])
    counts = answer["rounds_per_tree"]
    assert list(counts)[:2] == ["first", "plain"]  # the default, then that of fewest rows
    assert set(counts) <= {*TREES, "plain"}
    assert sum(counts.values()) == answer["rounds"] == len(answer["published_per_round"])
    assert answer["tree"] in {*TREES, "plain"}
    plain, *fixed, adaptive = answer["compared"]
    assert (plain["rounds_per_tree"], plain["tree"]) == ({"plain": 60}, "plain")
    for way in fixed:
        assert set(way["rounds_per_tree"]) == {way["way"]}
    assert adaptive["rounds_per_tree"] == counts

    from medusa_engine.runtime.cli import main as medusa_run

    capfd.readouterr()
    assert medusa_run(["--engine", str(exported), *ASK, "--stats"]) == 0
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("trees  "))
    assert "first in " in line and "plain in " in line and "; in use: " in line


@pytest.mark.parametrize("options", [("--no-adaptive",), ("--tree", "second.json"), ("--tree", "8")], ids=str)
def test_the_command_keeps_one_tree_on_request(
    exported: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.chdir(exported.parent)
    if options == ("--tree", "8"):  # one that is shipped, and too deep for two heads
        commands.run_refuses("--engine", exported, *ASK, *options, named=["tree 8"])
        return
    answer = json.loads(commands.run("--engine", exported, *ASK, *options, "--json", "--compare"))
    expected = "second" if "--tree" in options else "first"
    assert (answer["rounds_per_tree"], answer["tree"]) == ({expected: answer["rounds"]}, expected)
    assert [(way["way"], way["same_ids"]) for way in answer["compared"]] == [("plain", True), (expected, True)]


# What is refused


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("first.json", "[[0], [2]]", ["another tree is called first"]),
        ("other.json", "[[0, 0], [1], [0]]", ["first has the same paths"]),
        ("deep.json", "[[0], [0, 0], [0, 0, 0]]", ["tree deep", "2 heads"]),
        ("wide.json", "[[4]]", ["tree wide", "rank 4"]),
        ("many.json", json.dumps([[a] for a in range(4)] + [[a, 0] for a in range(4)]), ["tree many", "9 nodes"]),
        ("no.json", "[[0, 0]]", ["no.json"]),
    ],
)
def test_a_second_tree_is_checked_as_the_first_is(
    name: str, text: str, named: list[str], exported: Path, tmp_path: Path, commands: Commands
) -> None:
    (tmp_path / name).write_text(text)
    trees = ("--tree", exported.parent / "first.json", "--tree", tmp_path / name)
    model = exported.parent / "llama"
    commands.export_refuses("--model", model, *trees, "-o", tmp_path / "bundle", *SIZES, named=named)
    assert not (tmp_path / "bundle").exists()


def test_a_changed_or_missing_tree_is_seen_when_the_bundle_is_opened(bundle: Path, commands: Commands) -> None:
    path = bundle / "tree.2.json"
    text = path.read_text()
    path.write_text(text.replace("[0]", "[1]"))
    commands.run_refuses("--engine", bundle, *ASK, named=[path, "changed"])
    path.unlink()
    commands.run_refuses("--engine", bundle, *ASK, named=[path, "missing"])


def test_a_tree_that_would_be_used_unverified(bundle: Path, commands: Commands) -> None:
    edit_manifest(bundle, lambda document: document["files"].pop("tree.3.json"))
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / "manifest.json", "tree.3.json"])


@pytest.mark.parametrize("trees", [[], "tree.json", [1], {}, ["tree.json", "tree.json"], ["../tree.json"], None])
def test_tree_lists_that_are_none(trees: object, bundle: Path, commands: Commands) -> None:
    edit_manifest(bundle, lambda document: document.update(trees=trees))
    commands.run_refuses("--engine", bundle, *ASK, named=[bundle / "manifest.json"])
