"""Answers under a policy: plain sampling with transformers and numpy, and the engine's whatever is drafted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from cache_invariants import check_cache, prefill_cache
from drafts import ObservedState, PlantedDrafts
from tiny_models import Exported

from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.rounds import Decoding
from medusa_engine.runtime.sampling import draw, penalised_logits, processed_probabilities, uniforms
from medusa_engine.runtime.tree import Tree, parse_tree
from medusa_engine.runtime.tree_plan import TreePlan

TREE = parse_tree([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]], "a test's")


def sampled_ids(exported: Exported, prompt: Sequence[int], count: int, policy: AcceptancePolicy) -> list[int]:
    """Plain sampling: transformers' logits behind each token, penalised in numpy, one draw each."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            logits = exported.model(torch.tensor([tokens])).logits[0, -1].numpy()
        probabilities = processed_probabilities(
            penalised_logits(logits, np.array(tokens), policy.repetition_penalty),
            temperature=policy.temperature,
            top_k=policy.top_k,
            top_p=policy.top_p,
            min_p=policy.min_p,
        )
        uniform = uniforms(policy.seed, np.array([len(tokens) - 1]))  # of the last token's position
        tokens.append(int(draw(probabilities, uniform[0])))
    return tokens[len(prompt) :]


def check_planted_answer(
    exported: Exported, prompt: Sequence[int], expected: Sequence[int], policy: AcceptancePolicy, tree: Tree | None
) -> None:
    """Check that an answer is the expected one whatever is drafted, and its cache that of transformers.

    Args:
        expected: tokens of the answer, and as many more as a round may draft.
        tree: of the rounds; None for plain steps.
    """
    limits = exported.engine.limits
    count = len(expected) - limits.depth
    drafts = PlantedDrafts(len(prompt), expected, limits.vocab_size, np.random.default_rng(0))
    state = exported.engine.backend.new_state()
    state.use(policy)
    decoding = Decoding(
        state if tree is None else ObservedState(state, drafts),  # type: ignore[arg-type]
        limits,
        prompt,
        plan=None if tree is None else TreePlan(tree, limits),
        max_new_tokens=count,
        stop_ids=frozenset(),
    )
    answer = [token for round_ in decoding for token in round_.token_ids]
    assert answer == expected[:count]
    tokens = [*prompt, *answer]
    check_cache(state, len(tokens), prefill_cache(exported.model, tokens))  # type: ignore[arg-type]
    if tree is not None:
        published = [len(round_.token_ids) for round_ in decoding.rounds]
        assert published[:-1] == drafts.published[:-1]
        assert max(published) > 2
