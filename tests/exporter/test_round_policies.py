"""The graphs of sample and typical give what the numpy references give for the same logits and uniforms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graph_probe import Pending, RoundProbe, chunk_buffers
from random_rounds import PROMPT, ROUNDS, Floats, Round, check_accepted, random_round, uniforms_for
from tiny_models import RANDOM_VOCAB, Exported

from medusa_engine.runtime.accept import accept_greedy
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.policy_inputs import constant_inputs
from medusa_engine.runtime.posterior import accept_sample, accept_typical
from medusa_engine.runtime.sampling import draw, processed_probabilities


def run_round(probe: RoundProbe, round_: Round, policy: AcceptancePolicy, uniforms: Floats) -> dict[str, Any]:
    """The policy's graph on the round, behind a prompt of five tokens."""
    probe.reset()
    inputs = constant_inputs(policy, probe.limits.vocab_size)
    prompt = {"logits": np.zeros((PROMPT, RANDOM_VOCAB), np.float32), "uniforms": np.full(PROMPT, 0.5, np.float32)}
    probe.run(np.arange(PROMPT), Pending(0, []), chunk_buffers(PROMPT, probe.limits.depth), **inputs, **prompt)
    pending = Pending(PROMPT - 1, [0])
    return probe.run(round_.tokens, pending, round_.tree, logits=round_.logits, uniforms=uniforms, **inputs)


@pytest.fixture(scope="module")
def sample_probe(own_heads: Exported) -> RoundProbe:
    return RoundProbe(own_heads.bundle, given_logits=True, policy="sample")


@pytest.fixture(scope="module")
def typical_probe(own_heads: Exported) -> RoundProbe:
    return RoundProbe(own_heads.bundle, given_logits=True, policy="typical")


SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 4},
    {"top_k": 1000},
    {"top_p": 0.8},
    {"top_p": 1e-6},
    {"min_p": 0.3},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
]


@pytest.mark.parametrize("parameters", SAMPLING, ids=str)
def test_the_sample_graph_walks_as_the_reference(sample_probe: RoundProbe, parameters: dict[str, Any]) -> None:
    generator = np.random.default_rng(1)
    lengths = set()
    for _ in range(ROUNDS):
        round_ = random_round(generator, sample_probe)
        probabilities = processed_probabilities(round_.logits, **parameters)
        uniforms = uniforms_for(probabilities, generator)
        accepted = accept_sample(round_.tokens, draw(probabilities, uniforms), round_.tree.retrieve_indices)
        check_accepted(run_round(sample_probe, round_, AcceptancePolicy("sample", **parameters), uniforms), accepted)
        lengths.add(int(accepted.accepted_suffix_length))
    assert {0, 1, 2} <= lengths


def test_equal_logits_at_the_edges_are_kept_as_in_the_reference(sample_probe: RoundProbe) -> None:
    generator = np.random.default_rng(2)
    for parameters in ({"top_k": 3}, {"top_p": 0.5}):
        for _ in range(10):
            round_ = random_round(generator, sample_probe)
            round_ = round_._replace(logits=np.round(round_.logits))
            probabilities = processed_probabilities(round_.logits, **parameters)
            uniforms = uniforms_for(probabilities, generator)
            accepted = accept_sample(round_.tokens, draw(probabilities, uniforms), round_.tree.retrieve_indices)
            policy = AcceptancePolicy("sample", **parameters)  # type: ignore[arg-type]
            check_accepted(run_round(sample_probe, round_, policy, uniforms), accepted)


@pytest.mark.parametrize("uniform", [2.0**-24, 1 - 2.0**-24])
def test_the_outermost_uniforms_draw_the_outermost_tokens_that_are_kept(
    sample_probe: RoundProbe, uniform: float
) -> None:
    round_ = random_round(np.random.default_rng(3), sample_probe)
    rows = len(round_.tokens)
    kept = processed_probabilities(round_.logits, top_k=5) > 0
    drawn = kept.argmax(axis=1) if uniform < 0.5 else RANDOM_VOCAB - 1 - kept[:, ::-1].argmax(axis=1)
    accepted = accept_sample(round_.tokens, drawn, round_.tree.retrieve_indices)
    uniforms = np.full(rows, uniform, np.float32)
    check_accepted(run_round(sample_probe, round_, AcceptancePolicy("sample", top_k=5), uniforms), accepted)


@pytest.mark.parametrize("name", ["sample", "typical"])
def test_at_the_lowest_temperature_the_graphs_are_greedy(
    sample_probe: RoundProbe, typical_probe: RoundProbe, name: str
) -> None:
    generator = np.random.default_rng(4)
    probe = sample_probe if name == "sample" else typical_probe
    for _ in range(ROUNDS):
        round_ = random_round(generator, probe)
        uniforms = generator.random(len(round_.tokens), dtype=np.float32)
        values = run_round(probe, round_, AcceptancePolicy(name, temperature=1e-5), uniforms)
        greedy = accept_greedy(round_.tokens, round_.logits.argmax(axis=1), round_.tree.retrieve_indices)
        assert values["accepted_tokens"][: greedy.published_count].tolist() == greedy.published_tokens.tolist()
        assert values["accepted_count"].tolist() == [greedy.published_count]
        assert values["next_input_ids"][0, 0] == greedy.next_root


@pytest.mark.parametrize("root", ["argmax", "drawn"])
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.5},
        {"posterior_threshold": 0.5, "posterior_alpha": 1.5},
        {"posterior_threshold": 1.0, "posterior_alpha": 1.0},
    ],
    ids=str,
)
def test_the_typical_graph_accepts_as_the_reference(
    typical_probe: RoundProbe, parameters: dict[str, Any], root: str
) -> None:
    generator = np.random.default_rng(5)
    policy = AcceptancePolicy("typical", typical_root=root, top_k=5 if root == "drawn" else 0, **parameters)
    lengths = set()
    for _ in range(ROUNDS):
        round_ = random_round(generator, typical_probe)
        probabilities = processed_probabilities(round_.logits, temperature=policy.temperature)
        processed = processed_probabilities(round_.logits, temperature=policy.temperature, top_k=policy.top_k)
        uniforms = uniforms_for(processed, generator)
        accepted = accept_typical(
            round_.tokens,
            probabilities,
            draw(processed, uniforms) if root == "drawn" else round_.logits.argmax(axis=1),
            round_.tree.retrieve_indices,
            posterior_threshold=policy.posterior_threshold,
            posterior_alpha=policy.posterior_alpha,
        )
        check_accepted(run_round(typical_probe, round_, policy, uniforms), accepted)
        lengths.add(int(accepted.accepted_suffix_length))
    assert len(lengths) > 1
