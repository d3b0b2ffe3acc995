"""Draws in numpy: the distributions of transformers, and tokens of rounds that follow the target's exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from chi_square import check_counts, chi_square_p
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from medusa_engine.runtime.posterior import accept_rejection, accept_sample
from medusa_engine.runtime.sampling import draw, processed_probabilities, uniforms
from medusa_engine.runtime.tree import parse_tree
from medusa_engine.runtime.tree_buffers import compile_tree

CASES: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "sampling" / "cases.json").read_text())
SINGLE: dict[str, Any] = {case["id"]: case for case in CASES["single_step"] if "rep" not in case["params"]}
NAMES = {"T": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
ROUNDS = 200_000

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@pytest.mark.parametrize("name", SINGLE)
def test_probabilities_equal_those_of_the_case(name: str) -> None:
    case = SINGLE[name]
    params = {NAMES[key]: value for key, value in case["params"].items()}
    probabilities = processed_probabilities(np.array(case["logits"]), **params)
    np.testing.assert_allclose(probabilities, case["probs"], atol=1e-6)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, 100])
@pytest.mark.parametrize("min_p", [0.0, 0.2, 1.0])
def test_probabilities_equal_those_of_transformers(top_p: float, top_k: int, min_p: float) -> None:
    logits = np.random.default_rng(top_k).normal(0, 2, (20, 40))
    scores = TemperatureLogitsWarper(0.7)(None, torch.tensor(logits))
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    probabilities = processed_probabilities(logits, temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)
    np.testing.assert_allclose(probabilities, scores.softmax(-1).numpy(), atol=1e-12)


def test_equal_logits_at_the_edge_are_kept_together() -> None:
    logits = np.array([0.0, 1.0, 3.0, 1.0])
    np.testing.assert_array_equal(processed_probabilities(logits, top_k=2) > 0, [False, True, True, True])
    np.testing.assert_array_equal(processed_probabilities(logits, top_p=0.8) > 0, [False, True, True, True])


# The generator


def test_uniforms_are_of_the_seed_and_the_position_alone() -> None:
    every = uniforms(7, np.arange(100))
    assert uniforms(7, np.array([30, 31, 31, 30, 33])).tolist() == every[[30, 31, 31, 30, 33]].tolist()
    assert uniforms(7, np.array([99])).tolist() == [every[99]]
    assert not np.isin(uniforms(8, np.arange(100)), every).any()
    assert len(np.unique(every)) == 100


def test_uniforms_are_known_numbers() -> None:
    # Another version of numpy, or of this file, must not change what a seed gives. Written down from numpy 2.4.6.
    assert (uniforms(1, np.arange(3)) * 2**24).tolist() == [5093027, 15103999, 6849497]
    assert (uniforms(2**64 - 1, np.array([2047])) * 2**24).tolist() == [5457411]


def test_uniforms_are_uniform_and_never_0_or_1() -> None:
    values = uniforms(3, np.arange(ROUNDS))
    assert values.dtype == np.float32
    assert values.min() > 0
    assert values.max() < 1
    check_counts(np.histogram(values, 50, (0, 1))[0], np.full(50, 1 / 50))
    serial = np.histogram2d(values[:-1], values[1:], 8, ((0, 1), (0, 1)))[0]
    check_counts(serial.ravel(), np.full(64, 1 / 64))


@pytest.mark.parametrize("uniform", [2.0**-24, 0.5, 1 - 2.0**-24])
def test_a_token_without_probability_is_never_drawn(uniform: float) -> None:
    probabilities = np.array([[0, 0, 1e-30, 0], [0, 0.5, 0.5, 0], [0, 0, 0, 2.0]])
    tokens = draw(probabilities, np.full(3, uniform))
    assert (np.take_along_axis(probabilities, tokens[:, None], axis=1) > 0).all()


# Distributions: the chain of tokens that rounds write, against the target's own


LOGITS = np.array(SINGLE["plain"]["logits"])
VOCAB = len(LOGITS)
# Row t: what the target says behind token t. In the case it is the same behind all; here each has another order too.
ONE_TARGET = np.tile(LOGITS, (VOCAB, 1))
TARGETS = np.stack([np.roll(LOGITS, 3 * token) for token in range(VOCAB)])
PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "T05": {"temperature": 0.5},
    "topp08": {"top_p": 0.8},
    "minp02": {"min_p": 0.2},
    "T07_topk5_topp09": {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
}
TREE = compile_tree(parse_tree([[0], [1], [2], [0, 0], [1, 0]], "the case's"), topk=3, depth=2)

Round = Callable[[Ints, Floats, np.random.Generator], tuple[Ints, Ints, Ints]]


def sample_round(root: Ints, target: Floats, generator: np.random.Generator) -> tuple[Ints, Ints, Ints]:
    """Rounds of the case's tree, whose heads propose the ids 0, 1, 2."""
    slots = np.concatenate([root[:, None], np.tile([0, 1, 2], (len(root), 2))], axis=1)
    tokens = slots[:, TREE.tree_indices]  # [rounds, N]
    drawn = draw(target[tokens], generator.random(tokens.shape))
    accepted = accept_sample(tokens, drawn, TREE.retrieve_indices)
    return accepted.published_tokens, accepted.accepted_suffix_length, accepted.next_root


def rejection_round(root: Ints, target: Floats, generator: np.random.Generator) -> tuple[Ints, Ints, Ints]:
    """Rounds of a chain of two drafts, drawn from heads that know neither the root nor one another."""
    heads = np.random.default_rng(5).dirichlet(np.full(VOCAB, 0.7), 2)  # [D, V]
    proposal = np.broadcast_to(heads, (len(root), 2, VOCAB))
    drafts = draw(proposal, generator.random((len(root), 2)))
    tokens = np.concatenate([root[:, None], drafts], axis=1)
    uniform = generator.random((len(root), 5))
    accepted = accept_rejection(root, drafts, target[tokens], proposal, uniform[:, :2], uniform[:, 2:])
    return accepted.published_tokens, accepted.accepted_suffix_length, accepted.next_root


def three_tokens(round_: Round, target: Floats, generator: np.random.Generator) -> tuple[Ints, Ints]:
    """The three tokens behind token 0 of ROUNDS answers, and the accepted lengths of their first rounds."""
    root, lengths = np.zeros(ROUNDS, dtype=np.int64), []
    answers = np.full((ROUNDS, 0), -1)
    for _ in range(3):
        published, length, root = round_(root, target, generator)
        lengths.append(length)
        answers = np.concatenate([answers, published], axis=1)
    answers = np.concatenate([answers, root[:, None]], axis=1)
    order = np.argsort(answers < 0, axis=1, kind="stable")[:, 1:4]  # without the padding, behind the first root
    return np.take_along_axis(answers, order, axis=1), lengths[0]


@pytest.mark.parametrize("targets", [ONE_TARGET, TARGETS], ids=["one target", "a target per token"])
@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("round_", [sample_round, rejection_round])
def test_three_tokens_together_follow_the_target(round_: Round, name: str, targets: Floats) -> None:
    target = processed_probabilities(targets, **PARAMETERS[name])  # [V, V]
    if targets is ONE_TARGET and name in SINGLE:
        np.testing.assert_allclose(target[0], SINGLE[name]["probs"], atol=1e-6)
    tokens, lengths = three_tokens(round_, target, np.random.default_rng(11))
    joint = target[0][:, None, None] * target[:, :, None] * target[None]  # [V, V, V]: behind token 0
    counts = np.bincount(tokens @ [VOCAB * VOCAB, VOCAB, 1], minlength=VOCAB**3)
    check_counts(counts, joint.ravel())
    assert {1, 2} <= set(lengths.tolist()), "rounds whose drafts are accepted"


def test_draws_that_siblings_share_are_seen() -> None:
    # The trap of the case: 0.2443 would become 0.0062. Without this the test above could have no power.
    counts = np.array([0.99, 0.0062, 0.0038]) * ROUNDS
    exact = CASES["tree_round_distribution"]["exact_with_fresh_draws"]
    probabilities = np.array([exact["P(0)"], exact["P(1)"], 1 - exact["P(0)"] - exact["P(1)"]])
    assert chi_square_p(counts, probabilities) < 1e-9
