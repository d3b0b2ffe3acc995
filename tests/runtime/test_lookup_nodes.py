"""Lookup nodes of trees: their order, and what no tree or engine has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.tree import LOOKUP, Tree, check_tree, load_tree, parse_tree


def parsed(paths: list[list[Any]]) -> Tree:
    return parse_tree(paths, "a test")


def test_lookup_nodes_sort_behind_the_ranks_of_their_depth() -> None:
    tree = parsed([["L", "L"], [0], ["L"], [1], [0, 3]])
    assert tree.document() == [[0], [1], ["L"], [0, 3], ["L", "L"]]
    assert tree.paths == ((0,), (1,), (LOOKUP,), (0, 3), (LOOKUP, LOOKUP))
    assert (tree.nodes, tree.depth, tree.heads, tree.lookup, tree.widest_rank) == (6, 2, 2, 2, 3)
    assert tree.shrunk(4).document() == [[0], [1], ["L"]]
    assert tree.sizes == "6 nodes, 2 heads, 2 lookup nodes"
    alone = parsed([["L"]])
    assert (alone.depth, alone.heads, alone.lookup, alone.widest_rank) == (1, 0, 1, -1)
    assert alone.sizes == "2 nodes, 1 lookup node"


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ([[0], [0, "L"]], ["entry 1", "mixes lookup nodes", '["L"], ["L", "L"]']),
        ([["L"], ["L", 0]], ["entry 1", "mixes lookup nodes"]),
        ([["L", "L"]], ['parent ["L"] of ["L", "L"]']),
        ([["L"], ["L"]], ['path ["L"] is given twice']),
        ([["l"]], ['string rank "l"', 'lookup nodes as "L"']),
        ([[LOOKUP]], ["does not fit"]),
    ],
)
def test_paths_with_lookup_nodes_that_no_tree_has_are_refused(paths: list[Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_tree(paths, "t.json")
    for word in words:
        assert word in str(caught.value)


def test_lookup_nodes_behind_ranks_are_no_tree_in_python_either() -> None:
    for path in ((0, LOOKUP), (LOOKUP, 0)):
        with pytest.raises(ValueError, match="is not valid"):
            Tree(((0,), (LOOKUP,), path))


def test_an_engine_refuses_lookup_nodes_that_it_does_not_offer() -> None:
    tree = parsed([[0], ["L"], ["L", "L"]])
    check_tree(tree, heads=1, topk=1, max_tree_nodes=4, lookup=2)
    for offered, words in ((1, "the engine offers 1"), (0, "the engine was exported without lookup")):
        with pytest.raises(UserError, match=f"has 2 lookup nodes, but {words}") as caught:
            check_tree(tree, heads=1, topk=1, max_tree_nodes=4, lookup=offered)
        assert "--lookup-depth 2" in caught.value.hint
    with pytest.raises(UserError, match="has 65 lookup nodes") as caught:
        check_tree(parsed([["L"] * length for length in range(1, 66)]), heads=1, topk=1, max_tree_nodes=70, lookup=2)
    assert caught.value.hint == "use a tree with fewer: engines offer at most 64"


@pytest.mark.parametrize("name", ["plain", "adaptive"])
def test_a_tree_is_not_called_as_a_way_to_decode(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.json"
    path.write_text("[[0]]")
    with pytest.raises(UserError, match=f"the tree is called {name}"):
        load_tree(path)
