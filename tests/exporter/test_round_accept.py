"""The traced round accepts what the numpy reference accepts, and its heads read the row that won."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from graph_probe import Pending, RoundProbe, chunk_buffers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import Exported
from tree_strategies import trees

from medusa_engine.exporter.acceptance import accept_tokens, paths_of
from medusa_engine.exporter.heads import HeadWeights
from medusa_engine.runtime.accept import Acceptance, accept_greedy
from medusa_engine.runtime.tree import Tree, parse_tree
from medusa_engine.runtime.tree_buffers import TreeBuffers, compile_tree

ORACLES: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "oracles" / "worked_examples.json").read_text()
)
NINE: dict[str, Any] = ORACLES["nine_row_tree"]
NO_CHILD = 60  # a prediction that no packed token equals
BUNDLES = ["own_heads", "shared_heads", "zero_heads"]

Ints = npt.NDArray[np.int64]


class Case(NamedTuple):
    """A round: the tree, its packed tokens [N] and the target's prediction at each row [N]."""

    buffers: TreeBuffers
    tokens: Ints
    predicted: Ints


class Given(NamedTuple):
    """A probe whose logits the test gives, and what it was exported from."""

    probe: RoundProbe
    exported: Exported


@pytest.fixture(scope="module", params=BUNDLES)
def given_logits(request: pytest.FixtureRequest) -> Given:
    exported: Exported = request.getfixturevalue(request.param)
    return Given(RoundProbe(exported.bundle, given_logits=True), exported)


def one_hot(predicted: Ints, vocab_size: int) -> npt.NDArray[np.float32]:
    """Logits [N, V] with a tie: the prediction and token `vocab_size - 1` are both the largest; the first one wins."""
    logits = np.zeros((len(predicted), vocab_size), dtype=np.float32)
    logits[np.arange(len(predicted)), predicted] = 3
    logits[:, -1] = 3
    return logits


def traced_acceptance(probe: RoundProbe, case: Case) -> dict[str, npt.NDArray[Any]]:
    """Outputs of the exported round for the case, behind a prompt of five tokens."""
    probe.reset()
    probe.run(np.arange(5), Pending(0, []), chunk_buffers(5, probe.limits.depth), logits=one_hot(np.zeros(5, int), 61))
    logits = one_hot(case.predicted, probe.limits.vocab_size)
    return probe.run(case.tokens, Pending(4, [0]), case.buffers, logits=logits)


def check_acceptance(values: dict[str, npt.NDArray[Any]], expected: Acceptance) -> None:
    """Check what a round publishes and leaves pending against the reference."""
    count = expected.published_count
    assert values["accepted_count"].tolist() == values["next_pending_count"].tolist() == [count]
    assert values["accepted_tokens"][:count].tolist() == expected.published_tokens.tolist()
    assert (values["accepted_tokens"][count:] == -1).all()
    assert values["next_pending_rows"][:count].tolist() == expected.path_rows[:count].tolist()
    assert (values["next_pending_rows"] >= 0).all()  # rows behind the count are gathered too
    assert values["next_past_length"].tolist() == [5]  # the prompt: nothing of this round is committed yet
    assert values["next_input_ids"][0, 0] == expected.next_root
    assert values["next_position_ids"][0, 0] == 5 + count


@st.composite
def cases(draw: st.DrawFn, depth: int, topk: int) -> Case:
    """Few distinct tokens: matches, ties of paths, and token 0 at leaves are common."""
    tree = draw(trees(depth=depth, topk=topk, max_nodes=16))
    tokens = st.lists(st.integers(0, 2), min_size=tree.nodes, max_size=tree.nodes)
    return Case(compile_tree(tree, topk=topk, depth=depth), np.array(draw(tokens)), np.array(draw(tokens)))


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_the_exported_round_accepts_what_the_reference_accepts(given_logits: Given, data: Any) -> None:
    limits = given_logits.probe.limits
    case = data.draw(cases(limits.depth, limits.topk))
    expected = accept_greedy(case.tokens, case.predicted, case.buffers.retrieve_indices)
    check_acceptance(traced_acceptance(given_logits.probe, case), expected)


@settings(deadline=None, max_examples=200)
@given(case=cases(3, 3))
def test_the_round_in_torch_accepts_what_the_reference_accepts(case: Case) -> None:
    expected = accept_greedy(case.tokens, case.predicted, case.buffers.retrieve_indices)
    tokens, predicted, retrieve = (
        torch.tensor(array) for array in (case.tokens, case.predicted, case.buffers.retrieve_indices)
    )
    out = accept_tokens(paths_of(tokens, retrieve), predicted)
    count = expected.published_count
    assert out.length.tolist() == [count]
    assert out.tokens[:count].tolist() == expected.published_tokens.tolist()
    assert out.rows[:count].tolist() == expected.path_rows[:count].tolist()
    assert (out.rows >= 0).all()


def tree_of(paths: Any) -> Tree:
    return parse_tree([list(path) for path in paths], "a test")


UNEVEN = [[0], [1], [0, 0]]  # the leaf (1) is row 2, and the last row is 3
WORKED: dict[str, tuple[Any, list[int], dict[int, int], list[int]]] = {
    # name: paths, packed tokens, prediction by row (other rows: NO_CHILD), rows published
    "greedy round": (NINE["choices"], NINE["packed_tokens"], {0: 21, 1: 31, 3: 7}, [0, 1, 3]),
    "second branch": (NINE["choices"], NINE["packed_tokens"], {0: 22, 2: 31}, [0, 2, 6]),
    "no suffix": (NINE["choices"], NINE["packed_tokens"], {}, [0]),
    "only a later edge": (NINE["choices"], NINE["packed_tokens"], {1: 31}, [0]),
    "half of a path": (NINE["choices"], NINE["packed_tokens"], {0: 21}, [0, 1]),
    "token 0 predicted at a shallow leaf, last row holds 0": (UNEVEN, [11, 21, 22, 0], {0: 22, 2: 0}, [0, 2]),
    "the root's token predicted at a shallow leaf": (UNEVEN, [11, 21, 22, 0], {0: 22, 2: 11}, [0, 2]),
    "siblings with one token": ([[0], [1], [0, 0], [1, 0]], [11, 21, 21, 31, 32], {0: 21}, [0, 1]),
    "of siblings with one token the second goes on": (
        [[0], [1], [0, 0], [1, 0]],
        [11, 21, 21, 31, 32],
        {0: 21, 1: 32, 2: 32},
        [0, 2, 4],
    ),
    "root alone": ([], [11], {0: 21}, [0]),
}


@pytest.mark.parametrize("name", WORKED)
def test_the_exported_round_accepts_the_worked_rows(given_logits: Given, name: str) -> None:
    paths, tokens, by_row, rows = WORKED[name]
    limits = given_logits.probe.limits
    predicted = np.array([by_row.get(row, NO_CHILD) for row in range(len(tokens))])
    case = Case(compile_tree(tree_of(paths), topk=limits.topk, depth=limits.depth), np.array(tokens), predicted)
    values = traced_acceptance(given_logits.probe, case)
    assert values["accepted_tokens"][: len(rows)].tolist() == [tokens[row] for row in rows]
    check_acceptance(values, accept_greedy(case.tokens, case.predicted, case.buffers.retrieve_indices))
    assert values["next_pending_rows"][: len(rows)].tolist() == rows


# The frontier row


def heads_topk(weights: HeadWeights, lm_head: torch.Tensor, hidden: npt.NDArray[np.float32], topk: int) -> list[int]:
    """Candidates of all heads, head by head: `h + silu(W h + b)` block by block, then the projection."""
    candidates: list[int] = []
    for head in range(weights.heads):
        state = torch.tensor(hidden)
        for layer in range(weights.layers):
            block = weights.residual_weight[head, layer] @ state + weights.residual_bias[head, layer]
            state = state + block * torch.sigmoid(block)
        projection = lm_head if weights.projection is None else weights.projection[head]
        candidates += (projection @ state).topk(topk).indices.tolist()
    return candidates


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_heads_read_the_hidden_state_of_the_winning_row(given_logits: Given, length: int) -> None:
    probe, exported = given_logits
    limits = probe.limits
    tree = tree_of([[0], [1], [0, 0], [1, 0], [1, 1]])
    row_paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 5]]  # packed rows from the root to each row
    buffers = compile_tree(tree, topk=limits.topk, depth=limits.depth)
    next_tree = tree_of([[1], [3], [1, 0], [1, 2], [3, 3]])
    next_buffers = compile_tree(next_tree, topk=limits.topk, depth=limits.depth)
    tokens = np.array([11, 21, 22, 31, 32, 33])
    prompt = [5, 9, 2]
    lm_head = exported.model.get_output_embeddings().weight
    for path in (path for path in row_paths if len(path) == length):
        predicted = np.full(len(tokens), NO_CHILD)
        predicted[path[:-1]] = tokens[path[1:]]
        predicted[path[-1]] = 44
        probe.reset()
        probe.run(prompt, Pending(0, []), chunk_buffers(3, limits.depth), logits=one_hot(np.zeros(3, int), 61))
        logits = one_hot(predicted, limits.vocab_size)
        values = probe.run(tokens, Pending(2, [0]), buffers, next_tree=next_buffers, logits=logits)
        assert values["next_pending_rows"][:length].tolist() == path

        with torch.inference_mode():
            sequence = torch.tensor([[*prompt, *tokens[path].tolist()]])
            hidden = exported.model.model(sequence, use_cache=False).last_hidden_state[0, -1]
        slots = [44, *heads_topk(exported.heads, lm_head, hidden.numpy(), limits.topk)]
        assert values["next_input_ids"][0].tolist() == [slots[slot] for slot in next_buffers.tree_indices]
        # The winning row is at position 3 + its depth; the next root is one behind it, its children two.
        assert values["next_position_ids"][0].tolist() == [3 + length + d for d in (0, 1, 1, 2, 2, 2)]


def test_each_row_of_the_frontier_test_has_candidates_of_its_own(given_logits: Given) -> None:
    # Without this, heads that read another row could propose the same tokens.
    probe, exported = given_logits
    buffers = compile_tree(
        tree_of([[0], [1], [0, 0], [1, 0], [1, 1]]), topk=probe.limits.topk, depth=probe.limits.depth
    )
    tokens = np.array([11, 21, 22, 31, 32, 33])
    values = traced_acceptance(probe, Case(buffers, tokens, tokens))
    lm_head = exported.model.get_output_embeddings().weight
    proposals = [tuple(heads_topk(exported.heads, lm_head, row, probe.limits.topk)) for row in values["hidden"]]
    assert len(set(proposals)) == len(proposals)


def test_after_a_prompt_chunk_the_heads_read_its_last_row(given_logits: Given) -> None:
    probe, exported = given_logits
    limits = probe.limits
    prompt = [5, 9, 2, 40]
    tree = compile_tree(tree_of([[0], [1], [0, 1]]), topk=limits.topk, depth=limits.depth)
    probe.reset()
    chunk = chunk_buffers(4, limits.depth)
    values = probe.run(prompt, Pending(0, []), chunk, next_tree=tree, logits=one_hot(np.array([1, 2, 3, 44]), 61))
    assert (values["next_past_length"].tolist(), values["next_pending_count"].tolist()) == ([3], [1])
    assert values["next_pending_rows"][0] == 0
    with torch.inference_mode():
        hidden = exported.model.model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0, -1]
    slots = [
        44,
        *heads_topk(exported.heads, exported.model.get_output_embeddings().weight, hidden.numpy(), limits.topk),
    ]
    assert values["next_input_ids"][0].tolist() == [slots[slot] for slot in tree.tree_indices]
    assert values["next_position_ids"][0].tolist() == [4, 5, 5, 6]
