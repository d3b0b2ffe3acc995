"""Rounds of fixed shapes publish, propose and keep in the cache what those of free shapes do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from fixed_rounds import FixedProbe, export_fixed
from graph_probe import Arrays, Pending, RoundProbe, chunk_buffers
from tiny_models import RIGGED_VOCAB, Exported, Rigged
from tree_invariants import prefix_closure

from medusa_engine.runtime.lookup import lookup_tokens
from medusa_engine.runtime.tree import parse_tree
from medusa_engine.runtime.tree_buffers import TreeBuffers, compile_tree

MAX_LENGTH = 32
STATE = ("next_past_length", "next_pending_rows", "next_pending_count", "next_token_budget", "next_finished")
PUBLISHED = ("accepted_tokens", "accepted_count", "next_input_ids", "next_position_ids")


@pytest.fixture(scope="module")
def free(rigged_32: Exported) -> RoundProbe:
    return RoundProbe(rigged_32.bundle)


@pytest.fixture(scope="module")
def fixed(rigged_32: Exported, tmp_path_factory: pytest.TempPathFactory) -> FixedProbe:
    folder = tmp_path_factory.mktemp("fixed") / "bundle"
    export_fixed(rigged_32.checkpoint, folder, "--max-length", str(MAX_LENGTH), "--max-tree-nodes", "20")
    return FixedProbe(folder, stop_ids=2)


def random_tree(generator: np.random.Generator, probe: RoundProbe, nodes: int) -> TreeBuffers:
    paths = [generator.integers(0, 2, generator.integers(1, probe.limits.depth + 1)).tolist() for _ in range(6)]
    tree = parse_tree([list(path) for path in prefix_closure(paths)], "random").shrunk(nodes)
    return compile_tree(tree, topk=probe.limits.topk, depth=probe.limits.depth)


def pending_of(values: Arrays) -> Pending:
    count = int(values["next_pending_count"][0])
    return Pending(int(values["next_past_length"][0]), values["next_pending_rows"][:count].tolist())


def rows_of(probe: RoundProbe, count: int) -> list[np.ndarray]:
    return [buffer[:, :, :count] for buffer in probe._cache.values()]


def check_same(free: RoundProbe, fixed: FixedProbe, one: Arrays, other: Arrays, written: int) -> None:
    for name in (*STATE, *PUBLISHED):
        assert other[name].tolist() == one[name].tolist(), name
    for expected, got in zip(rows_of(free, written), rows_of(fixed, written), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)
    assert all(np.isfinite(buffer).all() for buffer in fixed._cache.values())


@pytest.mark.parametrize("prompt", [1, 2, 9])
@pytest.mark.parametrize("padding", [0, RIGGED_VOCAB - 1])
def test_trees_of_any_size_give_what_rounds_of_free_shapes_give(
    prompt: int, padding: int, free: RoundProbe, fixed: FixedProbe
) -> None:
    generator = np.random.default_rng(prompt)
    fixed.padding_token = padding
    free.reset()
    fixed.reset()
    chunk = chunk_buffers(prompt, free.limits.depth)
    tree = random_tree(generator, fixed, 7)
    tokens: Sequence[int] = generator.integers(0, RIGGED_VOCAB, prompt).tolist()
    pending = Pending(0, [])
    answers = [probe.run(tokens, pending, chunk, next_tree=tree) for probe in (free, fixed)]
    check_same(free, fixed, *answers, written=prompt)
    counts = set()
    while True:
        one = answers[0]
        pending = pending_of(one)
        room = MAX_LENGTH - pending.staged
        nodes = len(tree.tree_indices)
        if room < nodes:
            break
        next_tree = random_tree(generator, fixed, int(generator.integers(1, 13)))
        inputs = one["next_input_ids"][0]
        answers = [probe.run(inputs, pending, tree, next_tree=next_tree) for probe in (free, fixed)]
        check_same(free, fixed, *answers, written=pending.staged + nodes)
        counts.add(int(answers[0]["accepted_count"][0]))
        tree = next_tree
    assert max(counts) > 1, "no draft was ever accepted"


def test_a_round_keeps_the_history_that_it_looks_up_in(fixed: FixedProbe, rigged_heads: Rigged) -> None:
    limits = fixed.limits
    paths = [[0], [0, 0], *(["L"] * length for length in range(1, limits.lookup + 1))]
    tree = compile_tree(parse_tree(paths, "both"), topk=limits.topk, depth=limits.depth, heads=limits.heads)
    chunks = [[5, *rigged_heads.answer([5], 6)], [9, 2, 5, *rigged_heads.answer([5], 2)]]
    fixed.reset()
    pending, context = Pending(0, []), [*chunks[0], *chunks[1]]
    history = np.random.default_rng(0).integers(0, RIGGED_VOCAB, limits.cache_rows)  # what another session left
    for chunk in chunks:
        buffers = chunk_buffers(len(chunk), limits.depth)
        values = fixed.run(chunk, pending, buffers, next_tree=tree, history=history)
        history, pending = values["next_history"], pending_of(values)
    published = []
    for _ in range(4):
        root, *drafts = values["next_input_ids"][0].tolist()
        looked_up = [
            token
            for token, path in zip(drafts, tree.tree_indices[1:], strict=True)
            if path > limits.heads * limits.topk
        ]
        assert looked_up == lookup_tokens([*context, root], limits.lookup).tolist()
        values = fixed.run([root, *drafts], pending_of(values), tree, next_tree=tree, history=history)
        history, count = values["next_history"], int(values["accepted_count"][0])
        context += values["accepted_tokens"][:count].tolist()
        published.append(count)
    assert history[: len(context)].tolist() == context
    assert context == [*chunks[0], *chunks[1], *rigged_heads.answer(chunks[1], sum(published))]
    assert max(published) > 2


def test_the_largest_tree_runs_until_the_last_row_of_the_cache(fixed: FixedProbe, rigged_heads: Rigged) -> None:
    """The rows of the tree then lie behind `max_length`; what is published is the model's own answer to the end."""
    fixed.reset()
    tree = random_tree(np.random.default_rng(0), fixed, fixed.limits.max_tree_nodes)
    budget = np.array([MAX_LENGTH - 1])
    values = fixed.run(
        [3], Pending(0, []), chunk_buffers(1, fixed.limits.depth), next_tree=tree, token_budget=budget + 1
    )
    answer: list[int] = []
    while not values["next_finished"][0]:
        state = {"token_budget": values["next_token_budget"], "finished": values["next_finished"]}
        values = fixed.run(values["next_input_ids"][0], pending_of(values), tree, next_tree=tree, **state)
        answer += values["accepted_tokens"][: values["accepted_count"][0]].tolist()
    assert answer == rigged_heads.answer([3], MAX_LENGTH - 1)
    pending = pending_of(values)
    assert pending.staged == MAX_LENGTH
    for _ in range(2):  # passes that were launched before the host knew
        state = {"token_budget": values["next_token_budget"], "finished": values["next_finished"]}
        values = fixed.run(values["next_input_ids"][0], pending_of(values), tree, next_tree=tree, **state)
        assert values["accepted_count"].tolist() == [0]
        assert values["next_finished"].tolist() == [True]
        assert pending_of(values).staged == MAX_LENGTH


def test_nothing_is_published_behind_a_stop_token(fixed: FixedProbe, rigged_heads: Rigged) -> None:
    fixed.reset()
    tree = random_tree(np.random.default_rng(1), fixed, 15)
    expected = rigged_heads.answer([3], 12)
    values = fixed.run([3], Pending(0, []), chunk_buffers(1, fixed.limits.depth), next_tree=tree)
    answer: list[int] = []
    while not values["next_finished"][0]:
        stop = {"stop_ids": np.array([expected[-1]]), "token_budget": values["next_token_budget"]}
        values = fixed.run(values["next_input_ids"][0], pending_of(values), tree, next_tree=tree, **stop)
        answer += values["accepted_tokens"][: values["accepted_count"][0]].tolist()
    assert answer == expected


def test_plain_steps_are_rounds_of_one_node(fixed: FixedProbe, rigged_heads: Rigged) -> None:
    fixed.reset()
    alone = compile_tree(parse_tree([[0]], "alone").shrunk(1), topk=fixed.limits.topk, depth=fixed.limits.depth)
    values = fixed.run([3], Pending(0, []), chunk_buffers(1, fixed.limits.depth), next_tree=alone)
    answer = []
    for _ in range(8):
        answer.append(int(values["next_input_ids"][0, 0]))
        values = fixed.run(values["next_input_ids"][0], pending_of(values), alone)
        assert values["accepted_count"].tolist() == [1]
    assert answer == rigged_heads.answer([3], 8)


def test_a_root_that_nothing_decided_ends_the_answer_and_the_passes_behind_it(fixed: FixedProbe) -> None:
    fixed.reset()
    tree = random_tree(np.random.default_rng(2), fixed, 5)
    fixed.run([3], Pending(0, []), chunk_buffers(1, fixed.limits.depth), next_tree=tree)
    values = fixed.run([-1] * len(tree.tree_indices), Pending(0, [0]), tree, finished=np.array([True]))
    assert values["accepted_count"].tolist() == [0]
    assert values["next_finished"].tolist() == [True]
    assert np.isfinite(values["logits"]).all()
