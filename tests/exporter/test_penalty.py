"""Graphs that penalise repetition do so at each row for its own path alone, as the numpy references say."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from graph_probe import Pending, RoundProbe, chunk_buffers
from random_rounds import PROMPT, ROUNDS, TOKENS, Floats, Ints, Round, check_accepted, random_round, uniforms_for
from tiny_models import RANDOM_VOCAB, Exported

from medusa_engine.runtime.manifest import read_manifest
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.policy_inputs import constant_inputs
from medusa_engine.runtime.posterior import Accepted, accept_sample, accept_typical
from medusa_engine.runtime.sampling import draw, penalised_logits, processed_probabilities
from medusa_engine.runtime.tree_buffers import TreeBuffers

PARAMETERS: list[dict[str, Any]] = [
    {"name": "greedy"},
    {"name": "sample", "temperature": 0.7, "top_k": 12},
    {"name": "typical"},
]
PENALTIES = [1.3, 3.0, 0.5]


@pytest.fixture(scope="module", params=PARAMETERS, ids=lambda parameters: parameters["name"])
def probed(request: pytest.FixtureRequest, every_graph: Exported) -> tuple[dict[str, Any], RoundProbe]:
    name = request.param["name"]
    return request.param, RoundProbe(every_graph.bundle, given_logits=True, policy=f"{name}.penalty")


def penalised(round_: Round, history: Ints, penalty: float) -> Floats:
    """[N, V]: row by row, from the paths of the tree rather than its mask."""
    rows = np.empty(round_.logits.shape)
    for path in round_.tree.retrieve_indices.tolist():
        path = [row for row in path if row >= 0]
        for depth, row in enumerate(path, start=1):
            seen = np.concatenate([history, round_.tokens[path[:depth]]])
            rows[row] = penalised_logits(round_.logits[row], seen, penalty)
    return rows


def expected(policy: AcceptancePolicy, tokens: Ints, logits: Floats, tree: TreeBuffers, uniforms: Floats) -> Accepted:
    retrieve = tree.retrieve_indices
    if policy.name == "greedy":
        return accept_sample(tokens, logits.argmax(axis=-1), retrieve)
    if policy.name == "sample":
        probabilities = processed_probabilities(logits, temperature=policy.temperature, top_k=policy.top_k)
        return accept_sample(tokens, draw(probabilities, uniforms), retrieve)
    return accept_typical(
        tokens,
        processed_probabilities(logits),
        logits.argmax(axis=-1),
        retrieve,
        posterior_threshold=policy.posterior_threshold,
        posterior_alpha=policy.posterior_alpha,
    )


@pytest.mark.parametrize("penalty", PENALTIES)
def test_each_row_is_penalised_for_its_own_path(probed: tuple[dict[str, Any], RoundProbe], penalty: float) -> None:
    parameters, probe = probed
    policy = AcceptancePolicy(**parameters, repetition_penalty=penalty)
    inputs = constant_inputs(policy, RANDOM_VOCAB)
    generator = np.random.default_rng(1)
    lengths = set()
    for _ in range(ROUNDS):
        round_ = random_round(generator, probe)
        round_.logits[:, :TOKENS] -= 1  # the tokens of the trees are likely, and so are others
        history = generator.integers(0, RANDOM_VOCAB, PROMPT)
        scores = penalised(round_, history, penalty)
        drawn = {}
        uniforms = np.full(len(round_.tokens), 0.5, np.float32)
        if policy.draws:
            processed = processed_probabilities(scores, temperature=policy.temperature, top_k=policy.top_k)
            uniforms = uniforms_for(processed, generator)
        if policy.name != "greedy":
            drawn["uniforms"] = uniforms
        probe.reset()
        prompt = {"logits": np.zeros((PROMPT, RANDOM_VOCAB), np.float32), "history": np.zeros(0, np.int64)}
        filler = {name: np.full(PROMPT, 0.5, np.float32) for name in drawn}
        probe.run(history, Pending(0, []), chunk_buffers(PROMPT, probe.limits.depth), **inputs, **prompt, **filler)
        given = {"logits": round_.logits, "history": history}
        values = probe.run(round_.tokens, Pending(PROMPT - 1, [0]), round_.tree, **inputs, **given, **drawn)
        accepted = expected(policy, round_.tokens, scores, round_.tree, uniforms)
        check_accepted(values, accepted)
        lengths.add(int(accepted.accepted_suffix_length))
    assert len(lengths) > 1


@pytest.mark.parametrize("name", ["round", "step", "round.sample", "step.sample", "round.typical"])
def test_off_the_penalty_has_no_part_in_a_graph(every_graph: Exported, name: str) -> None:
    graphs = read_manifest(every_graph.bundle).graphs
    for graph, penalises in ((name, False), (f"{name}.penalty", True)):
        model = onnx.load(every_graph.bundle / graphs[graph], load_external_data=False)
        inputs = {value.name for value in model.graph.input}
        assert ({"history", "repetition_penalty"} <= inputs) == penalises
