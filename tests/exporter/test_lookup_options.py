"""What `medusa-export` refuses of --no-heads, --no-lookup and --lookup-depth, before anything is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_checks import Commands

from medusa_engine.exporter.settings import DEFAULT_LOOKUP, ExportSettings, check_settings
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.tree import check_tree, load_tree


@pytest.fixture
def ask(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "copies.json").write_text(json.dumps([["L"], ["L", "L"], ["L", "L", "L"]]))
    return ("--model", str(tmp_path), "--tree", str(tmp_path / "copies.json"))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--no-heads", "--heads", "x"), ["--heads and --no-heads are given together"]),
        (("--no-heads", "--untrained-heads", "3"), ["--untrained-heads and --no-heads are given together"]),
        (("--no-heads", "--no-lookup"), ["--no-heads and --no-lookup", "nothing would propose"]),
        (("--no-heads", "--acceptance", "rejection"), ["--no-heads has no --acceptance rejection"]),
        (("--no-heads", "--lookup-depth", "2"), ["has 3 lookup nodes", "the engine offers 2"]),
        (("--untrained-heads", "2"), ["has 3 lookup nodes", "the engine offers 2"]),
        (("--untrained-heads", "4", "--no-lookup"), ["has 3 lookup nodes", "exported without lookup"]),
        (("--untrained-heads", "4", "--lookup-depth", "0"), ["--lookup-depth is 0"]),
        (("--untrained-heads", "4", "--lookup-depth", "65"), ["--lookup-depth is 65"]),
    ],
)
def test_options_that_do_not_go_together(
    options: tuple[str, ...], named: list[str], ask: tuple[str, ...], commands: Commands
) -> None:
    commands.export_refuses(*ask, *options, named=named)


def test_a_tree_of_ranks_needs_heads(ask: tuple[str, ...], commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "copies.json").write_text("[[0]]")
    commands.export_refuses(*ask, "--no-heads", named=["depth 1", "0 heads"])


def test_of_an_engine_without_heads_the_hint_names_trees_that_it_runs() -> None:
    engine = {"heads": 0, "topk": 1, "max_tree_nodes": 8, "lookup": DEFAULT_LOOKUP}
    with pytest.raises(UserError) as caught:
        check_tree(load_tree(Path("8")), **engine)
    named = re.findall(r"lookup_\d+", caught.value.hint)
    assert named
    for name in named:
        check_tree(load_tree(Path(name)), **engine)


def test_how_many_lookup_nodes_there_are() -> None:
    settings = ExportSettings(model="m", trees=())
    assert (settings.lookup_nodes(3), settings.lookup_nodes(0)) == (3, DEFAULT_LOOKUP)
    assert ExportSettings(model="m", trees=(), lookup_depth=8).lookup_nodes(3) == 8
    assert ExportSettings(model="m", trees=(), lookup=False).lookup_nodes(3) == 0
    with pytest.raises(UserError, match="--lookup-depth and --no-lookup"):
        check_settings(ExportSettings(model="m", trees=(), lookup=False, lookup_depth=3))
