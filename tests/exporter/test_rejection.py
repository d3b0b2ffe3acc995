"""The graph of `rejection` accepts, corrects and draws drafts as the numpy references do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from graph_probe import Pending, RoundProbe, chunk_buffers
from random_rounds import PROMPT, ROUNDS, Floats, Ints, check_accepted, uniforms_for
from tiny_models import RANDOM_VOCAB, Exported

from medusa_engine.exporter.heads import HeadWeights, MedusaHeads
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.policy_inputs import constant_inputs
from medusa_engine.runtime.posterior import Accepted, accept_rejection
from medusa_engine.runtime.sampling import draw, processed_probabilities
from medusa_engine.runtime.tree import chain
from medusa_engine.runtime.tree_buffers import compile_tree

PARAMETERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 4},
    {"top_p": 0.8},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
]
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def probe(every_graph: Exported) -> RoundProbe:
    return RoundProbe(every_graph.bundle, given_logits=True, policy="rejection")


def run_chain(probe: RoundProbe, tokens: Ints, logits: Floats, policy: AcceptancePolicy, **given: Any) -> Any:
    """The graph on a chain behind a prompt of five tokens; it proposes the longest chain."""
    limits = probe.limits
    inputs = constant_inputs(policy, limits.vocab_size)
    halves = np.full(PROMPT, 0.5, np.float32)
    prompt = {
        "logits": np.zeros((PROMPT, RANDOM_VOCAB), np.float32),
        "uniforms": halves,
        "accept_uniforms": halves,
        "draft_uniforms": np.full(2 * limits.heads, 0.5, np.float32),
        "proposal": np.zeros((limits.heads, RANDOM_VOCAB), np.float32),
    }
    probe.reset()
    probe.run(np.arange(PROMPT), Pending(0, []), chunk_buffers(PROMPT, limits.depth), **inputs, **prompt)
    buffers = {n: compile_tree(chain(n), topk=limits.topk, depth=limits.depth) for n in (len(tokens) - 1, limits.heads)}
    return probe.run(
        tokens,
        Pending(PROMPT - 1, [0]),
        buffers[len(tokens) - 1],
        next_tree=buffers[limits.heads],
        logits=logits.astype(np.float32),
        **inputs,
        **{name: value.astype(np.float32) for name, value in given.items()},
    )


def padded(accepted: Accepted, depth: int) -> Accepted:
    """With the D+1 places of an engine's outputs."""
    rows, tokens = (
        np.pad(values, (0, depth + 1 - len(values)), constant_values=-1)
        for values in (accepted.path_rows, accepted.published_tokens)
    )
    return accepted._replace(path_rows=rows, published_tokens=tokens)


def head_logits(weights: HeadWeights, hidden: Floats) -> Floats:
    """[K, V]: `h + silu(W h + b)` block by block, then the projection."""
    assert weights.projection is not None
    rows = []
    for head in range(weights.heads):
        state = torch.tensor(hidden)
        for layer in range(weights.layers):
            block = weights.residual_weight[head, layer] @ state + weights.residual_bias[head, layer]
            state = state + block * torch.sigmoid(block)
        rows.append((weights.projection[head] @ state).numpy())
    return np.stack(rows)


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_chains_are_accepted_and_proposed_as_in_the_references(
    probe: RoundProbe, every_graph: Exported, parameters: dict[str, Any]
) -> None:
    limits = probe.limits
    policy = AcceptancePolicy("rejection", **parameters)
    generator = np.random.default_rng(1)
    outcomes = set()
    for _ in range(ROUNDS):
        depth = int(generator.integers(0, limits.heads + 1))  # a chain that the end of the cache cut, too
        logits = generator.normal(0, 1.5, (depth + 1, RANDOM_VOCAB)).astype(np.float32)
        target = processed_probabilities(logits, **parameters)
        proposal = generator.dirichlet(np.full(RANDOM_VOCAB, 0.3), limits.heads)
        proposal[:depth] = (proposal[:depth] + target[:depth]) / 2
        drafts = draw(proposal, generator.random(limits.heads))[:depth]
        ratio = target[np.arange(depth), drafts] / proposal[np.arange(depth), drafts]
        accept = generator.random((20, depth + 1))
        accept = next(row for row in accept if (np.abs(row[:depth] - ratio) > ROUNDING).all())
        residual = np.concatenate([np.maximum(target[:-1] - proposal[:depth], 0), target[-1:]])
        given = {
            "uniforms": uniforms_for(residual / residual.sum(axis=1, keepdims=True), generator),
            "accept_uniforms": accept,
            "draft_uniforms": generator.random(2 * limits.heads),
            "proposal": proposal,
        }
        root = generator.integers(0, RANDOM_VOCAB)
        tokens = np.array([root, *drafts])
        values = run_chain(probe, tokens, logits, policy, **given)
        accepted = accept_rejection(
            root, drafts, target, proposal[:depth], accept[:depth], given["uniforms"].astype(float)
        )
        check_accepted(values, padded(accepted, limits.depth))
        length = int(accepted.accepted_suffix_length)
        outcomes.add((length, length == depth))

        expected = processed_probabilities(head_logits(every_graph.heads, values["hidden"][length]), **parameters)
        np.testing.assert_allclose(values["next_proposal"], expected, atol=ROUNDING)
        drawn = values["next_input_ids"][0, 1:]
        uniforms = given["draft_uniforms"][length : length + limits.heads]
        cumulative, heads = expected.cumsum(axis=1), np.arange(limits.heads)
        assert (expected[heads, drawn] > 0).all()
        assert (cumulative[heads, drawn] > uniforms - ROUNDING).all()
        assert (cumulative[heads, drawn] - expected[heads, drawn] < uniforms + ROUNDING).all()
    assert {(0, False), (1, False), (limits.heads, True)} <= outcomes


def test_a_draft_that_rounding_rejects_leaves_a_draw_from_the_target(probe: RoundProbe) -> None:
    logits = np.random.default_rng(2).normal(0, 1, (2, RANDOM_VOCAB))
    target = processed_probabilities(logits)
    given = {
        "uniforms": uniforms_for(target, np.random.default_rng(3)),
        "accept_uniforms": np.full(2, 1 - 2.0**-24),
        "draft_uniforms": np.full(2 * probe.limits.heads, 0.5),
        "proposal": np.tile(target[0] * (1 + 1e-5), (probe.limits.heads, 1)),
    }
    values = run_chain(probe, np.array([3, 4]), logits, AcceptancePolicy("rejection"), **given)
    assert values["accepted_count"].tolist() == [1]
    assert values["next_input_ids"][0, 0] == draw(target, given["uniforms"])[0]


def test_heads_of_a_draft_vocabulary_have_no_probability_elsewhere() -> None:
    draft = torch.tensor([2, 5, 11])
    projection = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    weights = HeadWeights(torch.zeros(2, 1, 4, 4), torch.zeros(2, 1, 4), projection, trained=True, source="")
    heads = MedusaHeads(weights.with_token_map(draft), torch.nn.Linear(4, 13, bias=False))
    hidden = torch.ones(1, 4)
    full = heads.full_logits(hidden, 13)
    assert torch.equal(full[:, draft], heads(hidden))
    assert (full.softmax(dim=-1) > 0).sum(dim=0).nonzero()[:, 0].tolist() == draft.tolist()
