from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_invariants import check_tree_buffers, prefix_closure

from medusa_engine.runtime.tree import Tree, load_tree, parse_tree
from medusa_engine.runtime.tree_buffers import TreeBuffers, compile_tree

DATA = Path(__file__).parents[1] / "data"
SHIPPED = Path(__file__).parents[2] / "trees"
ORACLES: dict[str, Any] = json.loads((DATA / "oracles" / "worked_examples.json").read_text())
NINE: dict[str, Any] = ORACLES["nine_row_tree"]


def tree_of(paths: Any) -> Tree:
    return parse_tree([list(path) for path in paths], "a test")


def nine_row_buffers() -> TreeBuffers:
    return compile_tree(tree_of(NINE["choices"]), topk=NINE["topk"], depth=2)


def test_the_nine_row_tree_has_the_worked_buffers() -> None:
    tree = tree_of(NINE["choices"])
    buffers = nine_row_buffers()
    assert [[], *map(list, tree.paths)] == NINE["rows"]
    np.testing.assert_array_equal(buffers.tree_mask, np.array(NINE["tree_mask"], dtype=bool))
    np.testing.assert_array_equal(buffers.position_offsets, NINE["position_offsets"])
    np.testing.assert_array_equal(buffers.tree_indices, NINE["tree_indices"])
    np.testing.assert_array_equal(buffers.retrieve_indices, NINE["retrieve_indices"])


def test_the_nine_row_tree_gathers_the_worked_tokens_positions_and_staged_rows() -> None:
    buffers = nine_row_buffers()
    slots = np.concatenate([[NINE["root_token"]], *NINE["head_topk"]])  # [1 + heads * topk]
    past_length = NINE["prefix_length"]
    rows = len(buffers.tree_indices)
    np.testing.assert_array_equal(slots[buffers.tree_indices], NINE["packed_tokens"])
    np.testing.assert_array_equal(past_length + buffers.position_offsets, NINE["position_ids"])
    np.testing.assert_array_equal(past_length + np.arange(rows), NINE["staged_rows"])
    full_mask = np.concatenate([np.ones((rows, past_length), dtype=bool), buffers.tree_mask], axis=1)
    assert [1, 1, *full_mask.shape] == NINE["rectangular_mask_shape"]


def test_the_nine_row_mask_allows_the_worked_number_of_pairs() -> None:
    ledger = ORACLES["cost_ledger"]
    mask = nine_row_buffers().tree_mask
    assert mask.sum() == ledger["mask_ones"]
    assert mask.sum() + len(mask) * ledger["prefix"] == ledger["allowed_attention_pairs"]
    assert len(mask) * (len(mask) + ledger["prefix"]) == ledger["dense_attention_pairs"]


def test_the_six_node_example_has_the_worked_mask_and_depths_below_the_root() -> None:
    oracle = ORACLES["six_node_example"]
    buffers = compile_tree(tree_of([[0], [1], [0, 0], [0, 1], [1, 0]]), topk=2, depth=2)
    np.testing.assert_array_equal(buffers.tree_mask[1:, 1:], np.array(oracle["mask"], dtype=bool))
    assert buffers.tree_mask[:, 0].all()
    np.testing.assert_array_equal(buffers.position_offsets[1:], oracle["depth_after_root"])


@pytest.mark.parametrize(
    ("name", "widths", "root"),
    [
        ("cartesian_3_2_2", [3, 2, 2], 0),
        ("cartesian_2_3", [2, 3], 0),
        ("cartesian_4_4_4_4", [4, 4, 4, 4], 0),
        ("toy_two_by_two_with_root", [2, 2], 1),
    ],
)
def test_a_full_product_of_ranks_has_the_worked_number_of_nodes(name: str, widths: list[int], root: int) -> None:
    paths = [list(map(int, path)) for path in np.ndindex(*widths)]
    tree = tree_of(prefix_closure(paths))
    assert tree.nodes - 1 + root == ORACLES["tree_sizes"][name]
    buffers = compile_tree(tree, topk=4, depth=len(widths))
    assert buffers.retrieve_indices.shape == (np.prod(widths), len(widths) + 1)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), max_size=10).map(prefix_closure),
    st.integers(0, 2),
    st.randoms(use_true_random=False),
)
def test_the_buffers_give_back_the_path_set_they_come_from(
    paths: set[tuple[int, ...]], spare_depth: int, random: Any
) -> None:
    given_order = sorted(paths)
    random.shuffle(given_order)
    tree = tree_of(given_order)
    assert set(tree.paths) == paths
    depth = tree.depth + spare_depth
    buffers = compile_tree(tree, topk=7, depth=depth)
    check_tree_buffers(buffers, [(), *tree.paths], topk=7, depth=depth)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3), max_size=6).map(prefix_closure),
    st.integers(0, 5),
    st.integers(3, 5),
)
def test_the_buffers_of_a_tree_with_lookup_nodes_keep_every_invariant(
    paths: set[tuple[int, ...]], lookup: int, heads: int
) -> None:
    tree = tree_of([*paths, *(["L"] * length for length in range(1, lookup + 1))])
    buffers = compile_tree(tree, topk=7, depth=5, heads=heads)
    check_tree_buffers(buffers, [(), *tree.paths], topk=7, depth=5, heads=heads)


def test_lookup_slots_lie_behind_those_of_all_heads() -> None:
    buffers = compile_tree(tree_of([[0], ["L"], ["L", "L"], ["L", "L", "L"]]), topk=5, depth=3, heads=2)
    assert buffers.tree_indices.tolist() == [0, 1, 11, 12, 13]
    assert buffers.position_offsets.tolist() == [0, 1, 1, 2, 3]
    assert buffers.retrieve_indices.tolist() == [[0, 1, -1, -1], [0, 2, 3, 4]]
    with pytest.raises(ValueError, match="does not fit"):
        compile_tree(tree_of([[0], [0, 0]]), topk=5, depth=3, heads=1)


@pytest.mark.parametrize("file", sorted(path.name for path in SHIPPED.glob("*.json")))
def test_the_buffers_of_a_shipped_tree_keep_every_invariant(file: str) -> None:
    tree = load_tree(SHIPPED / file)
    depth = max(5, tree.depth)
    buffers = compile_tree(tree, topk=16, depth=depth, heads=5)
    check_tree_buffers(buffers, [(), *tree.paths], topk=16, depth=depth, heads=5)


def test_the_root_alone_has_one_padded_path() -> None:
    buffers = compile_tree(tree_of([]), topk=10, depth=3)
    assert buffers.retrieve_indices.tolist() == [[0, -1, -1, -1]]
    assert buffers.tree_mask.tolist() == [[True]]
    assert buffers.tree_indices.tolist() == buffers.position_offsets.tolist() == [0]


@pytest.mark.parametrize(("topk", "depth"), [(2, 2), (3, 1)])
def test_a_tree_beyond_topk_or_depth_is_not_compiled(topk: int, depth: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        compile_tree(tree_of(NINE["choices"]), topk=topk, depth=depth)


# Mutations that keep every shape: each must break an invariant of its own buffer


def check_mutant(buffers: TreeBuffers, tree: Tree, *, depth: int, **mutated: Any) -> None:
    for buffer in mutated.values():
        buffer.setflags(write=False)
    check_tree_buffers(dataclasses.replace(buffers, **mutated), [(), *tree.paths], topk=10, depth=depth)


def permuted(buffers: TreeBuffers, name: str, order: list[int]) -> Any:
    buffer = getattr(buffers, name)
    if name == "tree_mask":
        return buffer[np.ix_(order, order)]
    if name == "retrieve_indices":
        return np.where(buffer < 0, -1, np.asarray(order)[buffer])
    return buffer[order]


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(TreeBuffers)])
@settings(deadline=None)
@given(order=st.permutations(range(9)))
def test_rows_permuted_in_one_buffer_only_are_caught(name: str, order: list[int]) -> None:
    tree = tree_of(NINE["choices"])
    buffers = nine_row_buffers()
    mutant = permuted(buffers, name, order)
    if np.array_equal(mutant, getattr(buffers, name)):
        check_mutant(buffers, tree, depth=2, **{name: mutant})
    else:
        with pytest.raises(AssertionError, match=name):
            check_mutant(buffers, tree, depth=2, **{name: mutant})


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(TreeBuffers)])
def test_the_reversed_rows_of_one_buffer_are_caught(name: str) -> None:
    buffers = nine_row_buffers()
    mutant = permuted(buffers, name, list(range(8, -1, -1)))
    with pytest.raises(AssertionError, match=name):
        check_mutant(buffers, tree_of(NINE["choices"]), depth=2, **{name: mutant})


def test_positions_by_packed_row_are_caught() -> None:
    with pytest.raises(AssertionError, match="position_offsets"):
        check_mutant(nine_row_buffers(), tree_of(NINE["choices"]), depth=2, position_offsets=np.arange(9))


def test_siblings_that_see_each_other_are_caught() -> None:
    buffers = nine_row_buffers()
    mask = buffers.tree_mask.copy()
    mask[4, 3] = True  # (0, 1) sees (0, 0)
    with pytest.raises(AssertionError, match="tree_mask"):
        check_mutant(buffers, tree_of(NINE["choices"]), depth=2, tree_mask=mask)


def test_a_causal_mask_in_place_of_ancestors_is_caught() -> None:
    with pytest.raises(AssertionError, match="tree_mask"):
        check_mutant(nine_row_buffers(), tree_of(NINE["choices"]), depth=2, tree_mask=np.tri(9, dtype=bool))


def test_slots_of_the_neighbouring_head_are_caught() -> None:
    buffers = nine_row_buffers()
    slots = buffers.tree_indices + 10 * (buffers.position_offsets > 0)
    with pytest.raises(AssertionError, match="tree_indices"):
        check_mutant(buffers, tree_of(NINE["choices"]), depth=2, tree_indices=slots)


def test_padding_that_points_at_the_last_row_is_caught() -> None:
    tree = tree_of([[0], [1], [0, 0]])
    buffers = compile_tree(tree, topk=10, depth=2)
    assert buffers.retrieve_indices.tolist() == [[0, 2, -1], [0, 1, 3]]
    retrieve = buffers.retrieve_indices % tree.nodes  # -1 becomes row 3, as indexing reads it
    with pytest.raises(AssertionError, match="retrieve_indices"):
        check_mutant(buffers, tree, depth=2, retrieve_indices=retrieve)


def test_a_path_left_out_for_another_twice_is_caught() -> None:
    buffers = nine_row_buffers()
    retrieve = buffers.retrieve_indices.copy()
    retrieve[1] = retrieve[0]
    with pytest.raises(AssertionError, match="retrieve_indices"):
        check_mutant(buffers, tree_of(NINE["choices"]), depth=2, retrieve_indices=retrieve)


def test_the_buffers_cannot_be_written() -> None:
    buffers = nine_row_buffers()
    for field in dataclasses.fields(TreeBuffers):
        with pytest.raises(ValueError, match="read-only"):
            getattr(buffers, field.name)[0] = 0
