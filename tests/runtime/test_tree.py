from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_invariants import check_tree_buffers, prefix_closure

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.tree import (
    ACCEPTED_KEYS,
    MAX_TREE_BYTES,
    RANK_LIMIT,
    Tree,
    check_tree,
    load_tree,
    parse_tree,
)
from medusa_engine.runtime.tree_buffers import compile_tree

DATA = Path(__file__).parents[1] / "data"
SHIPPED = Path(__file__).parents[2] / "trees"
ORACLES: dict[str, Any] = json.loads((DATA / "oracles" / "worked_examples.json").read_text())
NINE: dict[str, Any] = ORACLES["nine_row_tree"]
CASES = DATA / "trees"
EXPECTED: dict[str, Any] = json.loads((CASES / "EXPECTED.json").read_text())
TOPK = 7

# What each refused case must name, in the words of the error.
NAMED = {
    "bad_missing_parent": ["parent [1] of [1, 0]"],
    "bad_negative_rank": ["-1", "negative"],
    "bad_float_rank": ["1.5", "integer"],
    "bad_string_rank": ['string rank "0"'],
    "bad_empty_path_inside": ["entry 0", "empty path (the root is implicit)"],
    "bad_scalar_entry": ["entry 0 is not a list"],
    "bad_huge_rank": ["9223372036854775808", "does not fit"],
    "bad_nested": ["entry 0", "nested list"],
    "bad_object_unknown_key": ['unknown top-level key "choices_v9"', *ACCEPTED_KEYS],
    "bad_trailing_comma": ["bad_trailing_comma.json", "line 1, column "],
    "bad_nan": ["NaN"],
    "dup_path": ["path [0]", "entries 0 and 2"],
    "leaf_only_compact": ["prefix [0] of [0, 0, 0, 0]"],
}
ACCEPTED = sorted(case for case, expected in EXPECTED.items() if expected["verdict"] == "accept")
CHECKED_AGAINST_AN_ENGINE = {"bad_deeper_than_2heads"}


path_sets = st.lists(st.lists(st.integers(0, TOPK - 1), min_size=1, max_size=4), max_size=10).map(prefix_closure)


def tree_of(paths: Any) -> Tree:
    return parse_tree([list(path) for path in paths], "a test")


def refusal(document: object) -> UserError:
    with pytest.raises(UserError) as caught:
        parse_tree(document, "t.json")
    assert caught.value.problem.startswith("t.json")
    assert "\n" not in caught.value.problem + caught.value.hint
    return caught.value


# Reading


@pytest.mark.parametrize("case", ACCEPTED)
def test_an_accepted_file_has_the_expected_nodes_depth_and_canonical_order(case: str) -> None:
    tree = load_tree(CASES / f"{case}.json")
    expected = EXPECTED[case]
    assert [list(path) for path in tree.paths] == expected["canonical"]
    assert (tree.nodes, tree.depth) == (expected["nodes_with_root"], expected["depth"])
    assert len(tree.paths) == expected["draft_nodes"]
    assert tree.name == case


@pytest.mark.parametrize("case", sorted(NAMED))
def test_a_refused_file_is_named_with_its_mistake(case: str) -> None:
    with pytest.raises(UserError) as caught:
        load_tree(CASES / f"{case}.json")
    for words in [f"{case}.json", *NAMED[case]]:
        assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2


def test_every_case_file_has_a_verdict_that_is_tested() -> None:
    files = {path.stem for path in CASES.glob("*.json")} - {"EXPECTED"}
    assert files == set(EXPECTED) == set(ACCEPTED) | set(NAMED) | CHECKED_AGAINST_AN_ENGINE


def test_a_tree_deeper_than_the_heads_is_refused_by_the_engine_check_only() -> None:
    tree = load_tree(CASES / "bad_deeper_than_2heads.json")
    check_tree(tree, heads=3, topk=1, max_tree_nodes=4)
    with pytest.raises(UserError, match=r"depth 3.* 2 heads"):
        check_tree(tree, heads=2, topk=1, max_tree_nodes=4)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (None, "null"),
        (3, "3"),
        ("[[0]]", '"[[0]]"'),
        ({}, '"paths" is missing'),
        ({"name": "x"}, '"paths" is missing'),
        ({"paths": 3}, "not a list"),
        ({"paths": {}}, "an object"),
        ({"paths": [[0]], "name": ""}, "name"),
        ({"paths": [[0]], "name": "two\nlines"}, r"two\nlines"),
        ({"paths": [[0]], "name": 3}, "name 3"),
        ([[True]], "true"),
        ([[None]], "null"),
        ([[{}]], "an object"),
        ([[RANK_LIMIT]], "does not fit"),
        ([[10**5000]], "does not fit"),
        ([[-(10**5000)]], "negative"),
        ([[0] * 20, [0]], "prefix [0, 0] of [0, 0, 0, 0, 0, 0, 0, 0, … 20 ranks]"),
    ],
)
def test_a_document_that_is_no_tree_is_refused_in_two_lines(document: object, words: str) -> None:
    assert words in str(refusal(document))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(json_values | st.fixed_dictionaries({"paths": json_values}, optional={"name": json_values}))
def test_any_json_value_is_a_tree_or_a_user_error(document: object) -> None:
    try:
        outcome: Tree | str = parse_tree(document, "t.json")
    except UserError as error:
        outcome = str(error)
    assert isinstance(outcome, Tree) or len(outcome.splitlines()) == 2


def test_the_largest_rank_that_fits_is_read() -> None:
    assert tree_of([[RANK_LIMIT - 1]]).widest_rank == RANK_LIMIT - 1


def test_an_empty_list_is_the_tree_of_the_root_alone() -> None:
    tree = tree_of([])
    assert (tree.nodes, tree.depth, tree.widest_rank) == (1, 0, -1)


def test_metadata_is_kept_as_written() -> None:
    metadata = {"heads": 2, "probabilities": [[0.5]], "metadata": {"anything": None}}
    tree = parse_tree({"paths": [[0]], "name": "mine", **metadata}, "t.json")
    assert tree.name == "mine"
    assert tree.metadata == metadata


@pytest.mark.parametrize("paths", [((0,), (0,)), ((1,), (0,)), ((0, 0),), ((),), ((-1,),)])
def test_a_tree_cannot_be_constructed_from_paths_that_are_not_canonical(
    paths: tuple[tuple[int, ...], ...],
) -> None:
    with pytest.raises(ValueError, match=r"canonical order|not valid"):
        Tree(paths)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "line 1, column 1"),
        (b'{"paths": [[0]],\n  "name" "x"}', "line 2, column 10"),
        (b"[[0]] [[1]]", "line 1, column 7"),
        (b"[[Infinity]]", "Infinity"),
        (b"[[-Infinity]]", "-Infinity"),
        (b"[[1e999]]", "1e999"),
        (b"[[" + b"9" * 5000 + b"]]", "5000 digits"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b'{"paths": [], "paths": [[0]]}', 'key "paths" is given twice'),
        (b'{"paths": [], "metadata": {"a": 1, "a": 2}}', 'key "a" is given twice'),
        (b'["\xff"]', "byte 2 is not UTF-8"),
        (b" " * (MAX_TREE_BYTES + 1), f"larger than {MAX_TREE_BYTES} bytes"),
    ],
)
def test_a_file_that_is_not_strict_json_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_tree(path)
    assert "broken.json" in caught.value.problem
    assert words in caught.value.problem
    assert len(str(caught.value).splitlines()) == 2


def test_a_file_of_the_largest_size_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "marked.json"
    path.write_bytes((b"\xef\xbb\xbf" + b"[[0]]").ljust(MAX_TREE_BYTES))
    assert load_tree(path).paths == ((0,),)


def test_a_missing_file_and_a_folder_are_user_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(UserError, match="cannot read the file"):
            load_tree(path)


# Shipped trees


def test_the_shipped_trees_are_written_in_canonical_order() -> None:
    files = sorted(SHIPPED.glob("*.json"))
    assert files
    for path in files:
        tree = load_tree(path)
        document = json.loads(path.read_text())
        assert tree.document() == document["paths"]
        assert tree.name == path.stem
        assert tree.metadata["description"]


def test_a_shipped_tree_named_by_a_number_has_that_many_nodes() -> None:
    for size in (1, 4, 8, 16, 64):
        assert load_tree(SHIPPED / f"{size}.json").nodes == size
    assert load_tree(SHIPPED / "64.json").paths == load_tree(SHIPPED / "mc_sim_7b_63.json").paths


def best_first(rank_mass: list[list[float]], budget: int) -> list[tuple[tuple[int, ...], float]]:
    """Heaviest reachable path first; source: arXiv 2401.10774, section 2.3.3."""
    open_paths: dict[tuple[int, ...], float] = {(rank,): mass for rank, mass in enumerate(rank_mass[0])}
    chosen = []
    for _ in range(budget):
        path = min(open_paths, key=lambda path: (-round(open_paths[path], 12), len(path), path))
        weight = open_paths.pop(path)
        chosen.append((path, weight))
        if len(path) < len(rank_mass):
            open_paths |= {(*path, rank): weight * mass for rank, mass in enumerate(rank_mass[len(path)])}
    return chosen


def test_the_small_shipped_trees_follow_from_their_rank_masses() -> None:
    oracle = ORACLES["greedy_tree_search"]
    chosen = best_first(oracle["rank_mass"], oracle["budget"])
    assert [list(path) for path, _ in chosen] == [path for path, _ in oracle["selected_in_order"]]
    assert [weight for _, weight in chosen] == pytest.approx([w for _, w in oracle["selected_in_order"]])
    assert sum(weight for _, weight in chosen) == pytest.approx(oracle["expected_accepted_suffix"])
    for size in (4, 8, 16):
        tree = load_tree(SHIPPED / f"{size}.json")
        metadata: Any = tree.metadata["metadata"]
        assert {path for path, _ in best_first(metadata["rank_mass"], size - 1)} == set(tree.paths)


# Engine limits


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"heads": 1}, ["depth 2", "has 1 head", "--heads"]),
        ({"topk": 2}, ["rank 2", "0 to 1", "--top-k 3"]),
        ({"max_tree_nodes": 8}, ["9 nodes", "allows 8", "--max-tree-nodes 9"]),
    ],
)
def test_an_engine_limit_is_refused_with_value_limit_and_the_option_that_raises_it(
    limits: dict[str, int], words: list[str]
) -> None:
    tree = tree_of(NINE["choices"])
    fitting = {"heads": 2, "topk": 3, "max_tree_nodes": 9}
    check_tree(tree, **fitting)
    with pytest.raises(UserError) as caught:
        check_tree(tree, **(fitting | limits))
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2


def test_the_root_alone_fits_every_engine() -> None:
    check_tree(tree_of([]), heads=0, topk=0, max_tree_nodes=1)


# Shrinking


@settings(deadline=None)
@given(path_sets, st.integers(1, 50))
def test_a_shrunk_tree_keeps_the_first_rows_and_stays_prefix_closed(paths: set[tuple[int, ...]], rows: int) -> None:
    tree = tree_of(paths)
    small = tree.shrunk(rows)
    assert small.nodes == min(rows, tree.nodes)
    assert small.paths == tree.paths[: small.nodes - 1]
    assert tree_of(small.paths).paths == small.paths
    whole = compile_tree(tree, topk=TOPK, depth=4)
    part = compile_tree(small, topk=TOPK, depth=4)
    check_tree_buffers(part, [(), *small.paths], topk=TOPK, depth=4)
    np.testing.assert_array_equal(part.tree_mask, whole.tree_mask[: small.nodes, : small.nodes])
    np.testing.assert_array_equal(part.tree_indices, whole.tree_indices[: small.nodes])
    np.testing.assert_array_equal(part.position_offsets, whole.position_offsets[: small.nodes])


def test_a_shrunk_tree_is_named_by_its_rows_and_a_whole_one_is_unchanged() -> None:
    tree = Tree(((0,), (1,)), "two", {"probabilities": [1, 2]})
    assert tree.shrunk(3) is tree
    assert tree.shrunk(2) == Tree(((0,),), "two[:2]")
    for rows in (0, -1):
        with pytest.raises(ValueError, match=str(rows)):
            tree.shrunk(rows)
