"""Lookup under every acceptance policy: drafts change the speed of an answer, never what it is."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from chi_square import check_counts
from drafts import ObservedState
from lookup_rounds import BOTH, CHAIN, REPETITIVE, Observer, plain
from policy_answers import sampled_ids
from tiny_models import Exported

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.onnxruntime_state import OnnxRuntimeState
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.rounds import Decoding
from medusa_engine.runtime.tree import parse_tree
from medusa_engine.runtime.tree_buffers import TreeBuffers
from medusa_engine.runtime.tree_plan import TreePlan


@pytest.mark.parametrize("bundle", ["own_heads", "no_heads"])
@pytest.mark.parametrize(
    "policy",
    [AcceptancePolicy("sample", temperature=0.5, seed=3), AcceptancePolicy("sample", top_k=2, seed=4)],
    ids=str,
)
def test_sampled_answers_are_those_of_the_same_seed_without_lookup(
    request: pytest.FixtureRequest, bundle: str, policy: AcceptancePolicy, observer: Observer
) -> None:
    exported = request.getfixturevalue(bundle)
    tree = BOTH if exported.engine.limits.heads else CHAIN
    answer = exported.engine.generate(prompt_ids=REPETITIVE, max_new_tokens=40, acceptance=policy, tree=tree)
    assert answer.token_ids == sampled_ids(exported, REPETITIVE, 40, policy)
    assert max(answer.published_per_round) > 1
    observer.check([*REPETITIVE, *answer.token_ids])


def test_typical_rounds_accept_of_a_lookup_what_is_likely_enough(own_heads: Exported, observer: Observer) -> None:
    engine, epsilon, alpha = own_heads.engine, 0.2, 0.9
    policy = AcceptancePolicy("typical", posterior_threshold=epsilon, posterior_alpha=alpha)
    answer = engine.generate(prompt_ids=REPETITIVE, max_new_tokens=60, acceptance=policy, tree=BOTH)
    tokens = [*REPETITIVE, *answer.token_ids]
    proposals = list(observer.proposals)
    observer.check(tokens)
    with torch.inference_mode():
        logits = own_heads.model(torch.tensor([tokens])).logits[0].double()
    probabilities = logits.softmax(-1)
    threshold = (alpha * (probabilities * logits.log_softmax(-1)).sum(-1).exp()).clamp(max=epsilon)
    position, copied, refused = len(REPETITIVE), 0, 0
    for published, (root_position, root, lookup) in zip(answer.published_per_round, proposals, strict=True):
        assert (root_position, root) == (position, tokens[position]) == (position, int(logits[position - 1].argmax()))
        drafts = tokens[position + 1 : position + published]
        for at, draft in enumerate(drafts, position):
            assert probabilities[at, draft] > threshold[at]
        copied += bool(drafts) and drafts == lookup[: len(drafts)]
        if published == 1 and position + 1 < len(tokens):
            assert probabilities[position, lookup[0]] <= threshold[position]
            refused += 1
        position += published
    assert copied and refused


def test_heads_and_lookup_that_propose_the_same_tokens_count_once(own_heads: Exported) -> None:
    # Both branches say what is right, down to a depth of their own.
    engine, generator = own_heads.engine, np.random.default_rng(0)
    tree = parse_tree([[0], [0, 0], [0, 0, 0], ["L"], ["L", "L"], ["L", "L", "L"]], "twice")
    for policy in (AcceptancePolicy(), AcceptancePolicy("sample", seed=8)):
        answer = (
            sampled_ids(own_heads, [7, 3, 1], 40, policy) if policy.name == "sample" else plain(engine, [7, 3, 1], 40)
        )
        planned: list[int] = []

        def plant(state: OnnxRuntimeState, buffers: TreeBuffers) -> None:
            begin = int(state.slot.position_ids[0, 0]) - 3
            right = [*answer[begin:], *[0] * 4]  # noqa: B023
            depths = generator.integers(0, 4, 2)
            for path, depth in zip(buffers.retrieve_indices, depths, strict=False):
                for edges, row in enumerate(path.tolist()):
                    if edges and row >= 0:
                        token = right[edges] if edges <= depth else (right[edges] + 1) % engine.limits.vocab_size
                        state.slot.input_ids[0, row] = token
            planned.append(1 + int(depths.max()))  # noqa: B023

        state = engine.backend.new_state()
        state.use(policy)
        decoding = Decoding(
            ObservedState(state, plant),  # type: ignore[arg-type]
            engine.limits,
            [7, 3, 1],
            plan=TreePlan(tree, engine.limits),
            max_new_tokens=36,
            stop_ids=frozenset(),
        )
        assert [token for round_ in decoding for token in round_.token_ids] == answer[:36]
        assert [len(round_.token_ids) for round_ in decoding.rounds][:-1] == planned[:-1]


def test_sampled_pairs_behind_a_lookup_have_the_models_probabilities(no_heads: Exported) -> None:
    engine, ranks = no_heads.engine, 3

    def best(tokens: list[int]) -> tuple[list[int], torch.Tensor]:
        with torch.inference_mode():
            logits = no_heads.model(torch.tensor([tokens])).logits[0, -1]
        values, ids = logits.topk(ranks)
        return ids.tolist(), values.double().softmax(0)

    # The prompt has the first token of every pair before, so that the second is looked up.
    firsts, first = best([*REPETITIVE, 8])
    prompt = REPETITIVE
    for token in firsts:
        seconds, _ = best([*REPETITIVE, token])
        prompt = [*prompt, 8, token, seconds[0]]
    prompt = [*prompt, *REPETITIVE[-3:], 8]
    firsts, first = best(prompt)
    cells, probabilities = {}, []
    for token, share in zip(firsts, first, strict=True):
        seconds, second = best([*prompt, token])
        for other, rest in zip(seconds, second, strict=True):
            cells[token, other] = len(cells)
            probabilities.append(float(share * rest))
    counts, rounds = np.zeros(len(cells)), 0
    with engine.session() as session:
        for seed in range(500):
            policy = AcceptancePolicy("sample", top_k=ranks, seed=seed)
            answer = session.generate(prompt_ids=prompt, max_new_tokens=2, acceptance=policy, tree=CHAIN)
            counts[cells[tuple(answer.token_ids)]] += 1  # type: ignore[index]
            rounds += answer.rounds
    check_counts(counts, np.array(probabilities))
    assert rounds < 1000, "no lookup was ever right"


def test_rejection_takes_no_lookup(every_graph: Exported) -> None:
    rejection, without_sample = AcceptancePolicy("rejection"), copy.copy(every_graph.engine)
    without_sample.manifest = replace(without_sample.manifest, policies=("greedy", "rejection"))
    for engine, advised in ((every_graph.engine, True), (without_sample, False)):
        with pytest.raises(UserError, match="lookup nodes, but rejection accepts a chain") as refused:
            engine.generate(prompt_ids=[1], tree=CHAIN, acceptance=rejection)
        assert ("--acceptance sample" in refused.value.hint) is advised


def test_lookup_with_the_repetition_penalty(every_graph: Exported, observer: Observer) -> None:
    options: dict[str, Any] = {"prompt_ids": REPETITIVE, "max_new_tokens": 30}
    policy = AcceptancePolicy(repetition_penalty=1.05)
    answer = every_graph.engine.generate(**options, acceptance=policy, tree=BOTH).token_ids
    assert answer == every_graph.engine.generate(**options, acceptance=policy, speculation=False).token_ids
    observer.check([*REPETITIVE, *answer])
