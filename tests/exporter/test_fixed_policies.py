"""Sample and typical with fixed shapes: uniforms by position, no sorted logits, temperature 0 is greedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from fixed_rounds import FixedProbe, export_fixed
from graph_probe import Pending, chunk_buffers
from random_rounds import PROMPT, ROUNDS, Round, check_accepted, random_round
from tiny_models import RANDOM_VOCAB, Exported

from medusa_engine.exporter.bisection import weights_by_bisection
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.policy_inputs import constant_inputs
from medusa_engine.runtime.posterior import accept_sample, accept_typical
from medusa_engine.runtime.sampling import draw, processed_probabilities, uniforms

SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 100.0, "top_p": 0.4},
    {"temperature": 1e-5, "top_p": 0.4},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 1000},
    {"top_p": 0.8},
    {"top_p": 1e-6},
    {"min_p": 0.3},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
]
KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "fp32": lambda generator, size: generator.normal(0, 3, (7, size)),
    "fp16": lambda generator, size: generator.normal(0, 3, (7, size)).astype(np.float16),
    "bf16": lambda generator, size: torch.from_numpy(generator.normal(0, 3, (7, size))).bfloat16().float().numpy(),
    "many equal": lambda generator, size: generator.integers(-3, 4, (7, size)),
    "all equal": lambda generator, size: np.zeros((7, size)),
    "large": lambda generator, size: generator.normal(0, 300, (7, size)).astype(np.float16),
    "hidden tokens": lambda generator, size: np.where(
        generator.random((7, size)) < 0.5, -np.inf, generator.normal(0, 3, (7, size))
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [RANDOM_VOCAB, 4096])
def test_what_is_kept_is_what_the_reference_keeps(kind: str, size: int) -> None:
    logits = KINDS[kind](np.random.default_rng(size), size).astype(np.float32)
    for parameters in SAMPLING:
        expected = processed_probabilities(logits, **parameters)
        number = {name: torch.tensor([float(parameters.get(name, off))]) for name, off in OFF.items()}
        top_k = torch.tensor([min(parameters.get("top_k", size), size)])
        weights = weights_by_bisection(torch.from_numpy(logits), top_k=top_k, **number).numpy()
        got = weights / weights.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(got, expected, atol=1e-6, err_msg=f"{parameters}")
        seen = expected > 1e-30  # fp32 has no smaller ones beside the largest, 1
        assert (got[seen] > 0).all(), parameters
        assert (got[expected == 0] == 0).all(), parameters


OFF = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}


@pytest.fixture(scope="module")
def bundle(own_heads: Exported, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fixed") / "bundle"
    sizes = ("--max-length", "100", "--top-k", "5", "--max-tree-nodes", "24")
    return export_fixed(own_heads.checkpoint, folder, *sizes, "--acceptance", "sample,typical").bundle


@pytest.fixture(scope="module")
def probes(bundle: Path) -> dict[str, FixedProbe]:
    policies = ("greedy", "sample", "typical")
    return {policy: FixedProbe(bundle, given_logits=True, policy=policy) for policy in policies}


def run_round(probe: FixedProbe, round_: Round, policy: AcceptancePolicy) -> tuple[dict[str, Any], np.ndarray]:
    """The policy's graph on the round behind a prompt of five tokens, and the uniforms of the round's rows."""
    table = uniforms(policy.seed, np.arange(probe.limits.cache_rows))
    inputs = constant_inputs(policy, RANDOM_VOCAB) | {"uniforms": table}
    inputs["temperature"] = np.array([policy.temperature], np.float32)
    for name in ("top_p", "min_p"):
        inputs.setdefault(name, np.array([getattr(policy, name)], np.float32))
    inputs["top_k"] = np.array([min(policy.top_k or RANDOM_VOCAB, RANDOM_VOCAB)])
    inputs.setdefault("posterior_threshold", np.array([policy.posterior_threshold], np.float32))
    inputs.setdefault("posterior_alpha", np.array([policy.posterior_alpha], np.float32))
    inputs.setdefault("root_drawn", np.array([False]))
    probe.reset()
    prompt = {"logits": np.zeros((PROMPT, RANDOM_VOCAB), np.float32)}
    probe.run(np.arange(PROMPT), Pending(0, []), chunk_buffers(PROMPT, probe.limits.depth), **inputs, **prompt)
    values = probe.run(round_.tokens, Pending(PROMPT - 1, [0]), round_.tree, logits=round_.logits, **inputs)
    return values, table[PROMPT + round_.tree.position_offsets]


@pytest.mark.parametrize("parameters", SAMPLING, ids=str)
def test_the_sample_graph_walks_as_the_reference(probes: dict[str, FixedProbe], parameters: dict[str, Any]) -> None:
    generator = np.random.default_rng(1)
    for seed in range(ROUNDS // 4):
        round_ = random_round(generator, probes["sample"])
        values, drawn_with = run_round(probes["sample"], round_, AcceptancePolicy("sample", seed=seed, **parameters))
        drawn = draw(processed_probabilities(round_.logits, **parameters), drawn_with)
        check_accepted(values, accept_sample(round_.tokens, drawn, round_.tree.retrieve_indices))


@pytest.mark.parametrize("root", ["argmax", "drawn"])
def test_the_typical_graph_accepts_as_the_reference(probes: dict[str, FixedProbe], root: str) -> None:
    generator = np.random.default_rng(2)
    for seed in range(ROUNDS // 4):
        round_ = random_round(generator, probes["typical"])
        policy = AcceptancePolicy("typical", seed=seed, temperature=0.9, top_k=9, typical_root=root)
        values, drawn_with = run_round(probes["typical"], round_, policy)
        probabilities = processed_probabilities(round_.logits, temperature=0.9, top_k=9)
        next_tokens = draw(probabilities, drawn_with) if root == "drawn" else round_.logits.argmax(axis=-1)
        accepted = accept_typical(
            round_.tokens,
            processed_probabilities(round_.logits, temperature=0.9),
            next_tokens,
            round_.tree.retrieve_indices,
            posterior_threshold=policy.posterior_threshold,
            posterior_alpha=policy.posterior_alpha,
        )
        check_accepted(values, accepted)


@pytest.mark.parametrize("policy", ["greedy", "sample", "typical"])
def test_of_equal_logits_the_lowest_id_is_chosen_and_temperature_0_is_greedy(
    probes: dict[str, FixedProbe], policy: str
) -> None:
    generator = np.random.default_rng(3)
    longest = 0
    for _ in range(ROUNDS // 4):
        round_ = random_round(generator, probes[policy])
        round_ = round_._replace(logits=np.round(round_.logits))
        values, _ = run_round(probes[policy], round_, AcceptancePolicy(policy, temperature=0.0, seed=1))
        best = round_.logits.argmax(axis=-1)  # numpy's is the first
        path = accept_sample(round_.tokens, best, round_.tree.retrieve_indices)
        check_accepted(values, path)
        longest = max(longest, int(path.accepted_suffix_length))
    assert longest > 0


@pytest.mark.parametrize("policy", ["sample", "typical"])
def test_uniforms_are_by_position_and_nothing_is_ranked(bundle: Path, policy: str) -> None:
    graph = onnx.load(bundle / f"round.{policy}.onnx", load_external_data=False).graph
    sizes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in graph.input}
    assert "ranks" not in sizes
    assert sizes["uniforms"] == sizes["past_key.0"][2:3]
