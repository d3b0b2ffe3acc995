"""The uniforms of `rejection`, by position and stream, give answers of the target's distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from chi_square import check_counts, chi_square_p

from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.policy_inputs import drawn_inputs
from medusa_engine.runtime.posterior import accept_rejection
from medusa_engine.runtime.sampling import ACCEPT_STREAM, DRAFT_STREAM, TARGET_STREAM, draw, uniforms
from medusa_engine.runtime.tree import chain

Ints = npt.NDArray[np.int64]

ANSWERS = 200_000
SPACING = 8  # positions of each answer
VOCAB, HEADS = 6, 2
SEED = 3

TARGET = np.random.default_rng(1).dirichlet(np.full(VOCAB, 0.8), VOCAB)  # [V, V]: behind each token
# Heads are worse the farther they guess, and read the last token published.
PROPOSAL = [0.6 * TARGET @ TARGET + 0.4 / VOCAB, np.random.default_rng(2).dirichlet(np.full(VOCAB, 0.8), VOCAB)]


def three_tokens(fault: str = "") -> Ints:
    """The three tokens behind token 0 of ANSWERS answers, [answers, 3], with the uniforms that a graph is given."""
    keys = np.arange(ANSWERS * SPACING)
    streams = {stream: uniforms(SEED, keys, stream) for stream in (TARGET_STREAM, ACCEPT_STREAM, DRAFT_STREAM)}
    if fault == "one uniform for draft and acceptance":
        streams[ACCEPT_STREAM] = streams[DRAFT_STREAM]
    if fault == "one uniform for acceptance and correction":
        streams[ACCEPT_STREAM] = streams[TARGET_STREAM]
    if fault == "one uniform for draft and correction":
        streams[TARGET_STREAM] = streams[DRAFT_STREAM]
    positions = np.arange(ANSWERS) * SPACING  # of the last token of the prompt, which is 0
    root = draw(TARGET[np.zeros(ANSWERS, dtype=np.int64)], streams[TARGET_STREAM][positions])
    frontier = np.zeros(ANSWERS, dtype=np.int64)
    answers, offsets = np.full((ANSWERS, 2 * HEADS + 3), -1), np.zeros(ANSWERS, dtype=np.int64)
    for _ in range(2):  # each publishes a token at least, and the third is the next root
        positions = positions + 1  # of the root
        judged = positions[:, None] + np.arange(HEADS)
        proposal = np.stack([head[frontier] for head in PROPOSAL], axis=1)  # [answers, K, V]
        drafts = draw(proposal, streams[DRAFT_STREAM][judged])
        target = TARGET[np.concatenate([root[:, None], drafts], axis=1)]  # [answers, K + 1, V]
        target_uniforms = streams[TARGET_STREAM][positions[:, None] + np.arange(HEADS + 1)]
        accepted = accept_rejection(root, drafts, target, proposal, streams[ACCEPT_STREAM][judged], target_uniforms)
        length = accepted.accepted_suffix_length
        for place in range(HEADS + 1):
            rows = place <= length
            answers[rows, (offsets + place)[rows]] = accepted.published_tokens[rows, place]
        offsets += length + 1
        frontier = np.take_along_axis(accepted.published_tokens, length[:, None], axis=1)[:, 0]
        positions = positions + length
        root = accepted.next_root
    answers[np.arange(ANSWERS), offsets] = root
    return answers[:, :3]


def counts_and_joint(tokens: Ints) -> tuple[Ints, npt.NDArray[np.float64]]:
    joint = TARGET[0][:, None, None] * TARGET[:, :, None] * TARGET[None]  # [V, V, V]
    return np.bincount(tokens @ [VOCAB * VOCAB, VOCAB, 1], minlength=VOCAB**3), joint.ravel()


def test_three_tokens_together_follow_the_target() -> None:
    check_counts(*counts_and_joint(three_tokens()))


@pytest.mark.parametrize(
    "fault",
    [
        "one uniform for draft and acceptance",
        "one uniform for acceptance and correction",
        "one uniform for draft and correction",
    ],
)
def test_streams_that_are_one_are_seen(fault: str) -> None:
    assert chi_square_p(*counts_and_joint(three_tokens(fault))) < 1e-9


def test_a_pass_gets_the_uniforms_of_its_positions() -> None:
    policy = AcceptancePolicy("rejection", seed=SEED)
    positions = np.array([9, 10, 11])
    inputs: dict[str, Any] = drawn_inputs(policy, "round", positions, 2)
    assert inputs["uniforms"].tolist() == uniforms(SEED, positions).tolist()
    assert inputs["accept_uniforms"].tolist() == uniforms(SEED, positions, ACCEPT_STREAM).tolist()
    # Behind 1 to 3 published tokens the next root is at 10 to 12; its drafts are judged there and one behind.
    assert inputs["draft_uniforms"].tolist() == uniforms(SEED, np.arange(10, 14), DRAFT_STREAM).tolist()
    assert len(set(np.concatenate(list(inputs.values())).tolist())) == 3 + 3 + 4
    assert set(drawn_inputs(policy, "step", positions, 2)) == {"uniforms"}
    assert set(drawn_inputs(AcceptancePolicy("sample"), "round", positions, 2)) == {"uniforms"}
    assert drawn_inputs(AcceptancePolicy("rejection", temperature=0), "round", positions, 2) == {}


def test_a_chain_has_rank_0_alone() -> None:
    assert chain(3).paths == ((0,), (0, 0), (0, 0, 0))
    assert chain(0).nodes == 1
