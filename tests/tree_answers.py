"""Greedy answers of an exported model with several trees, compared with transformers' own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from drafts import ObservedState, PlantedDrafts
from greedy_check import check_greedy
from tiny_models import Exported

from medusa_engine.runtime.rounds import Decoding
from medusa_engine.runtime.tree import parse_tree
from medusa_engine.runtime.tree_plan import TreePlan

# They fit these options of medusa-export. Lookup depends on no model; without it an export takes a tenth less.
SIZES = ("--untrained-heads", "3", "--top-k", "4", "--max-tree-nodes", "16", "--no-lookup")
TREES: dict[str, list[list[int]] | None] = {
    "none": None,
    "chain": [[0], [0, 0], [0, 0, 0]],
    "branches": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 1], [1, 0, 3]],
}


def check_answers(exported: Exported, prompt: Sequence[int], reference: Sequence[int]) -> None:
    """Run with every tree, on the heads' own drafts and on planted ones, accepted at every length from 0 to the depth.

    Args:
        reference: transformers' answer, longer than the one that is asked for by the depth of the trees.
    """
    limits = exported.engine.limits
    count = len(reference) - limits.depth
    accepted = set()
    for name, paths in TREES.items():
        for planted in (False, True) if paths else (False,):
            state = exported.engine.backend.new_state()
            drafts = PlantedDrafts(len(prompt), reference, limits.vocab_size, np.random.default_rng(1))
            decoding = Decoding(
                ObservedState(state, drafts) if planted else state,
                limits,
                prompt,
                plan=TreePlan(parse_tree(paths, name), limits) if paths else None,
                max_new_tokens=count,
                stop_ids=frozenset(),
            )
            published = [round_.token_ids for round_ in decoding]
            check_greedy([token for ids in published for token in ids], reference[:count], prompt, exported.model)
            if planted:
                accepted |= {len(ids) - 1 for ids in published}
    assert accepted == set(range(limits.depth + 1))
