"""medusa-tree show: the sketch and the drawing of a tree, and what it refuses in two lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import DATA, write_tree

from medusa_engine.runtime.tree import load_tree
from medusa_engine.training.calibration import load_calibration
from medusa_engine.training.tree_search import joint_mass, marginal_mass, rank_mass

CASES = DATA / "trees"
EXPECTED: dict[str, dict[str, Any]] = json.loads((CASES / "EXPECTED.json").read_text())
BAD_TREES = sorted(name for name in EXPECTED if name.startswith("bad_") and name != "bad_deeper_than_2heads")

Refuses = Callable[..., None]
Run = Callable[..., tuple[str, str]]


def test_show_sketches_and_draws(calibration: Path, tmp_path: Path, tree_run: Run) -> None:
    tree = tmp_path / "t.json"
    tree_run("search", calibration, "--nodes", 4, "--counts", "joint", "-o", tree)
    out, _ = tree_run("show", tree)
    assert "%" in out and out.count("──") == load_tree(tree).nodes - 1
    png, svg = tmp_path / "t.png", tmp_path / "t.SVG"
    out, _ = tree_run("show", tree, "-o", png, "-o", svg)
    assert out == f"{png}\n{svg}\n"
    assert png.read_bytes()[1:4] == b"PNG" and b"node-root" in svg.read_bytes()


def test_show_finds_shipped_trees_by_name_unless_there_is_a_file(
    tmp_path: Path, tree_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert tree_run("show", "8")[0].startswith("8: 8 nodes, 3 heads\n")
    assert tree_run("show", "mc_sim_7b_63.json")[0].startswith("mc_sim_7b_63: 64 nodes")
    write_tree(tmp_path / "8.json", [[0]])
    assert tree_run("show", "8.json")[0].startswith("8: 2 nodes, 1 head\n")


def test_show_takes_probabilities_from_a_calibration(calibration: Path, tmp_path: Path, tree_run: Run) -> None:
    tree = write_tree(tmp_path / "t.json")
    ranks = load_calibration(calibration).ranks
    assert "%" not in tree_run("show", tree)[0]
    joint = joint_mass(ranks)
    total = 1 + sum(joint(path) for path in ((0,), (1,), (0, 0)))
    assert f"E[G] {total:.2f}" in tree_run("show", tree, "--calibration", calibration)[0]
    marginal = marginal_mass(rank_mass(ranks, 4))
    total = 1 + sum(marginal(path) for path in ((0,), (1,), (0, 0)))
    assert f"E[G] {total:.2f}" in tree_run("show", tree, "--calibration", calibration, "--counts", "marginal")[0]


def test_probabilities_belong_to_the_paths_as_the_file_lists_them(tmp_path: Path, tree_run: Run) -> None:
    tree = tmp_path / "t.json"
    tree.write_text('{"paths": [[1], [0, 0], [0]], "probabilities": [0.2, 0.3, 0.6]}')
    lines = [line.split()[-3:-1] for line in tree_run("show", tree)[0].splitlines()[2:]]
    assert lines == [["0", "60%"], ["0", "30%"], ["1", "20%"]]


@pytest.mark.parametrize(
    "probabilities", ["[0.5]", "[0.5, 2]", "[0.5, -0.1]", '[0.5, "1"]', "[0.5, true]", "0.5", "{}"]
)
def test_probabilities_that_do_not_fit_the_paths(probabilities: str, tmp_path: Path, tree_refuses: Refuses) -> None:
    tree = tmp_path / "t.json"
    tree.write_text(f'{{"paths": [[0], [1]], "probabilities": {probabilities}}}')
    tree_refuses("show", tree, named=[tree, "probabilit"])


@pytest.mark.parametrize("case", [*BAD_TREES, "dup_path", "leaf_only_compact"])
def test_bad_tree_is_refused(case: str, tmp_path: Path, tree_refuses: Refuses) -> None:
    tree = CASES / f"{case}.json"
    tree_refuses("show", tree, named=[tree])
    tree_refuses("show", tree, "-o", tmp_path / "t.svg", named=[tree])


def test_show_refuses_what_it_cannot_read_or_write(calibration: Path, tmp_path: Path, tree_refuses: Refuses) -> None:
    tree = CASES / "ok_basic_4heads.json"
    tree_refuses("show", tmp_path / "none.json", named=[tmp_path / "none.json", "cannot read"])
    tree_refuses("show", "no_such_name", named=["no_such_name", "cannot read"])
    tree_refuses("show", tree, "-o", tmp_path / "t.pdf", named=[tmp_path / "t.pdf", ".pdf"])
    tree_refuses("show", tree, "-o", tmp_path / "t", named=[tmp_path / "t", "without an ending"])
    tree_refuses("show", tree, "-o", tmp_path / "t.png", "-o", tmp_path / "t.gif", named=[".gif"])
    missing = tmp_path / "none" / "t.png"
    tree_refuses("show", tree, "-o", missing, named=[missing, "folder does not exist"])
    tree_refuses("show", tree, "--calibration", calibration, named=["depth 3", "2 heads"])
    tree_refuses("show", tree, "--calibration", tree, named=[tree, "not a calibration"])
