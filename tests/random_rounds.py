"""Random rounds for the graphs of acceptance: trees, their tokens, the target's logits, and what is accepted."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from graph_probe import RoundProbe
from tiny_models import RANDOM_VOCAB
from tree_invariants import prefix_closure

from medusa_engine.runtime.posterior import Accepted
from medusa_engine.runtime.tree import parse_tree
from medusa_engine.runtime.tree_buffers import TreeBuffers, compile_tree

Floats = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

ROUNDS = 40
TOKENS = 3  # distinct ones in the trees: matches are common
LIKELY = 2e-3  # tokens below are drawn by luck of rounding only
PROMPT = 5


class Round(NamedTuple):
    """A random round: the tree, its packed tokens [N], the target's logits [N, V]."""

    tree: TreeBuffers
    tokens: Ints
    logits: npt.NDArray[np.float32]


def random_round(generator: np.random.Generator, probe: RoundProbe) -> Round:
    limits = probe.limits
    paths = [generator.integers(0, 3, generator.integers(1, limits.depth + 1)).tolist() for _ in range(5)]
    tree = parse_tree([list(path) for path in prefix_closure(paths)], "random").shrunk(limits.max_tree_nodes)
    logits = generator.normal(0, 1, (tree.nodes, RANDOM_VOCAB))
    logits[:, :TOKENS] += 3
    buffers = compile_tree(tree, topk=limits.topk, depth=limits.depth)
    head, rank = np.divmod(buffers.tree_indices - 1, limits.topk)
    tokens = (rank + generator.integers(0, TOKENS, limits.depth)[head]) % TOKENS  # siblings differ, as a head's do
    return Round(buffers, tokens, logits.astype(np.float32))


def uniforms_for(probabilities: Floats, generator: np.random.Generator) -> npt.NDArray[np.float32]:
    """[R] uniforms in the middle of the interval of a token of each row: rounding cannot move them to another."""
    tokens = []
    for row in probabilities:
        likely = np.flatnonzero(row > min(LIKELY, row.max() / 2))
        in_tree = likely[likely < TOKENS]
        tokens.append(generator.choice(in_tree if len(in_tree) and generator.random() < 0.7 else likely))
    cumulative = probabilities.cumsum(axis=-1)
    rows = np.arange(len(tokens))
    return (cumulative[rows, tokens] - probabilities[rows, tokens] / 2).astype(np.float32)


def check_accepted(values: dict[str, Any], accepted: Accepted) -> None:
    count = int(accepted.accepted_suffix_length) + 1
    assert values["accepted_count"].tolist() == values["next_pending_count"].tolist() == [count]
    assert values["accepted_tokens"].tolist() == accepted.published_tokens.tolist()
    assert values["next_pending_rows"][:count].tolist() == accepted.path_rows[:count].tolist()
    assert values["next_past_length"].tolist() == [PROMPT]
    assert values["next_input_ids"][0, 0] == accepted.next_root
    assert values["next_position_ids"][0, 0] == PROMPT + count
