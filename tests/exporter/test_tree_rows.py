"""Each row of a tree pass is what its root-to-node path is when transformers runs it alone.

transformers computes in double precision here, so that the tolerance is left to the rounding of the engine alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import demo_model
import numpy as np
import numpy.typing as npt
import pytest
import torch
from double_precision import double_precision
from graph_probe import Pending, RoundProbe, chunk_buffers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import Exported
from tree_strategies import trees

from medusa_engine.runtime.tree import Tree, load_tree, parse_tree
from medusa_engine.runtime.tree_buffers import TreeBuffers, compile_tree

TOLERANCE = 1e-4
BUNDLES = ["own_heads", "shared_heads"]  # an untied and a tied LM projection
COMB = parse_tree([[0], [1], [2], [0, 0], [0, 1], [1, 0], [1, 1], [2, 0]], "nine rows")

Floats = npt.NDArray[np.float32]


class TreePass:
    """A tree pass behind a prompt of which some rows are still pending, and not side by side.

    The prompt is run as a chunk, then a first tree; `accepted` is a root-to-node path of it that the pass under test
    commits (whatever the model thinks of it).
    """

    def __init__(
        self, probe: RoundProbe, model: Any, generator: np.random.Generator, prompt_length: int, accepted: Sequence[int]
    ) -> None:
        limits = probe.limits
        self.probe, self.model, self.depth, self.topk = probe, model, limits.depth, limits.topk
        self._tokens = lambda count: generator.integers(0, limits.vocab_size, count)
        probe.reset()
        prompt, first = self._tokens(prompt_length), self._tokens(COMB.nodes)
        probe.run(prompt, Pending(0, []), chunk_buffers(prompt_length, self.depth))
        probe.run(first, Pending(prompt_length - 1, [0]), compile_tree(COMB, topk=self.topk, depth=self.depth))
        self.pending = Pending(prompt_length, list(accepted))
        self.context = [*prompt.tolist(), *first[list(accepted)].tolist()]

    def use(self, tree: Tree) -> None:
        """Choose the tree, with random tokens, and run its paths alone."""
        self.buffers = compile_tree(tree, topk=self.topk, depth=self.depth)
        self.tokens = self._tokens(tree.nodes)
        self.expected = paths_alone(self.model, self.context, self.tokens, self.buffers)

    def differences(self, **replaced: Any) -> tuple[Floats, Floats]:
        """[N], [N]: largest difference of each row's logits and of its hidden state."""
        values = self.probe.run(self.tokens, self.pending, self.buffers, keep_cache=False, **replaced)
        logits, hidden = (
            np.abs(values[name] - expected).max(axis=-1)
            for name, expected in zip(("logits", "hidden"), self.expected, strict=True)
        )
        return logits, hidden


def paths_alone(
    model: Any, context: list[int], tokens: npt.NDArray[np.int64], buffers: TreeBuffers
) -> tuple[Floats, Floats]:
    """Logits [N, V] and hidden state [N, H] of the last token of context + path, for the path of each row."""
    by_depth: dict[int, list[int]] = defaultdict(list)
    for row, depth in enumerate(buffers.position_offsets.tolist()):
        by_depth[depth].append(row)
    results: dict[int, tuple[Floats, Floats]] = {}
    for rows in by_depth.values():
        # Ancestors come before their descendants in the packed order.
        sequences = [[*context, *tokens[np.flatnonzero(buffers.tree_mask[row])].tolist()] for row in rows]
        with torch.inference_mode():
            hidden = model.model(torch.tensor(sequences), use_cache=False).last_hidden_state[:, -1]  # [rows, H]
            logits = model.lm_head(hidden)  # [rows, V]
        for index, row in enumerate(rows):
            results[row] = logits[index].numpy(), hidden[index].numpy()
    ordered = [results[row] for row in range(len(tokens))]
    return np.stack([logits for logits, _ in ordered]), np.stack([hidden for _, hidden in ordered])


@pytest.fixture(scope="module", params=BUNDLES)
def exact(request: pytest.FixtureRequest) -> Iterator[tuple[RoundProbe, Any]]:
    """A bundle's probe, and its model in double precision."""
    exported: Exported = request.getfixturevalue(request.param)
    with double_precision(exported.model) as model:
        yield RoundProbe(exported.bundle), model


@pytest.fixture(scope="module")
def exact_demo(demo_transformers: Any) -> Iterator[tuple[RoundProbe, Any]]:
    """The same of the demo model."""
    with double_precision(demo_transformers) as model:
        yield RoundProbe(demo_model.BUNDLE), model


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_every_row_equals_its_path_run_alone(exact: tuple[RoundProbe, Any], data: Any) -> None:
    limits = exact[0].limits
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    accepted = data.draw(st.sampled_from([[0], [0, 2], [0, 3], [0, 1, 5], [0, 2, 6], [0, 3, 8]]))
    tree_pass = TreePass(*exact, generator, data.draw(st.integers(1, 9)), accepted)
    tree_pass.use(data.draw(trees(depth=limits.heads, topk=limits.topk, max_nodes=limits.max_tree_nodes)))
    check_rows(*tree_pass.differences())


def check_rows(logits: Floats, hidden: Floats) -> None:
    assert logits.max() <= TOLERANCE, f"logits of rows {np.flatnonzero(logits > TOLERANCE)} differ by {logits.max()}"
    assert hidden.max() <= TOLERANCE, f"states of rows {np.flatnonzero(hidden > TOLERANCE)} differ by {hidden.max()}"


# Faults: each is a pass with one wrong input, and every one must show


def visible_siblings(tree_pass: TreePass) -> dict[str, Any]:
    """Every row also sees the rows that share its parent."""
    mask = tree_pass.buffers.tree_mask
    proper = mask & ~np.eye(len(mask), dtype=bool)
    same_ancestors = (proper[:, None] == proper[None]).all(axis=-1)
    return {"tree_mask": mask | same_ancestors}


def earlier_rows_visible(tree_pass: TreePass) -> dict[str, Any]:
    """The causal mask of a sequence: every packed row sees all rows before it."""
    return {"tree_mask": np.tri(len(tree_pass.tokens), dtype=np.bool_)}


def mask_rows_swapped(tree_pass: TreePass) -> dict[str, Any]:
    """Two leaves of different parents have each other's mask row (each still sees itself)."""
    mask = tree_pass.buffers.tree_mask.copy()
    mask[[4, 6]] = mask[[6, 4]]
    mask[[4, 6], [6, 4]] = False
    mask[[4, 6], [4, 6]] = True
    return {"tree_mask": mask}


def positions_by_packed_row(tree_pass: TreePass) -> dict[str, Any]:
    """Positions count rows instead of depth."""
    return {"position_ids": (tree_pass.pending.staged + np.arange(len(tree_pass.tokens)))[None]}


def positions_swapped(tree_pass: TreePass) -> dict[str, Any]:
    """Rows of different depth have each other's position."""
    offsets = tree_pass.buffers.position_offsets.copy()
    offsets[[3, 8]] = offsets[[8, 3]]
    return {"position_ids": (tree_pass.pending.staged + offsets)[None]}


def suffix_without_root_committed(tree_pass: TreePass) -> dict[str, Any]:
    """a rows are committed instead of a + 1."""
    return {"pending_count": np.array([len(tree_pass.pending.rows) - 1])}


def contiguous_suffix_committed(tree_pass: TreePass) -> dict[str, Any]:
    """The first G staged rows are committed whatever was accepted."""
    return {"pending_rows": np.arange(tree_pass.depth + 1)}


def rows_of_another_path_committed(tree_pass: TreePass) -> dict[str, Any]:
    """The tokens are those of one path, keys and values those of another of the same length."""
    return {"pending_rows": np.array([0, 1, 4] + [0] * (tree_pass.depth - 2))}


FAULTS = [
    visible_siblings,
    earlier_rows_visible,
    mask_rows_swapped,
    positions_by_packed_row,
    positions_swapped,
    suffix_without_root_committed,
    contiguous_suffix_committed,
    rows_of_another_path_committed,
]


def worked_pass(probe: RoundProbe, model: Any) -> TreePass:
    """The nine-row tree behind seven tokens of prompt and three pending rows."""
    tree_pass = TreePass(probe, model, np.random.default_rng(3), 7, [0, 2, 6])
    tree_pass.use(COMB)
    return tree_pass


def check_that_every_fault_shows(tree_pass: TreePass) -> None:
    check_rows(*tree_pass.differences())
    for fault in FAULTS:
        logits, hidden = tree_pass.differences(**fault(tree_pass))
        assert min(logits.max(), hidden.max()) > 100 * TOLERANCE, f"{fault.__name__}: {logits.max()}, {hidden.max()}"


def test_a_wrong_mask_position_or_commit_changes_rows_by_far_more_than_the_tolerance(
    exact: tuple[RoundProbe, Any],
) -> None:
    check_that_every_fault_shows(worked_pass(*exact))


@pytest.mark.demo
def test_a_wrong_input_changes_rows_of_the_demo_model_by_far_more_than_the_tolerance(
    exact_demo: tuple[RoundProbe, Any],
) -> None:
    check_that_every_fault_shows(worked_pass(*exact_demo))


@pytest.mark.demo
@pytest.mark.parametrize("tree", ["16", "smollm2_64"])
def test_every_row_of_the_demo_model_equals_its_path_run_alone(exact_demo: tuple[RoundProbe, Any], tree: str) -> None:
    tree_pass = TreePass(*exact_demo, np.random.default_rng(64), 20, [0, 2, 6])
    tree_pass.use(load_tree(demo_model.ROOT / "trees" / f"{tree}.json"))
    check_rows(*tree_pass.differences())
