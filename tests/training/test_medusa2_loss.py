"""The losses of Medusa-2 and their labels, against numbers worked out by hand and torch's own."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from checkpoints import DATA

from medusa_engine.training.example import Example
from medusa_engine.training.labels import IGNORED
from medusa_engine.training.medusa2_cli import Medusa2Settings
from medusa_engine.training.medusa2_data import row_labels
from medusa_engine.training.medusa2_loss import (
    DIRECT_LAMBDA,
    DISTILLED_LAMBDA,
    combine,
    cross_entropy_sum,
    divergence_sum,
    hits,
    loss_weights,
)
from medusa_engine.training.packing import pack

ORACLES = json.loads((DATA / "oracles" / "worked_examples.json").read_text())


def owned(*tokens: int) -> Example:
    return Example(np.array(tokens), np.ones(len(tokens), dtype=np.bool_))


def test_weights_and_rates_are_those_of_the_worked_examples() -> None:
    losses, offsets = ORACLES["medusa2_losses"], ORACLES["training_offsets"]
    assert losses["direct"] == f"L_LM + {DIRECT_LAMBDA}*L_medusa"
    assert losses["self_distilled"].startswith(f"KL(teacher||student) + {DISTILLED_LAMBDA}*L_medusa")
    settings = Medusa2Settings()
    assert settings.learning_rate == losses["lr_backbone"]
    assert settings.heads_learning_rate_factor == losses["head_lr_ratio"]
    assert settings.learning_rate * settings.heads_learning_rate_factor == pytest.approx(losses["lr_head"])
    by_head = offsets["head_weights_lambda_0_8"]
    both = loss_weights(3, DIRECT_LAMBDA, heads_only=False).tolist()
    assert both == pytest.approx([1, *(DIRECT_LAMBDA * weight for weight in by_head)])
    assert loss_weights(3, DIRECT_LAMBDA, heads_only=True).tolist() == pytest.approx([0, *by_head])


def test_label_counts_are_those_of_the_worked_examples() -> None:
    offsets = ORACLES["training_offsets"]
    rows = pack([owned(*range(offsets["S"]))] * offsets["B"], offsets["S"], 0)
    counts = sum((row_labels(row, offsets["heads"]) != IGNORED).sum(axis=0) for row in rows)
    assert counts[1:].tolist() == offsets["geometric_label_counts"]
    (row,) = pack([owned(*range(7))], 7, 0)
    assert (row_labels(row, 3) != IGNORED).sum(axis=0)[1:].tolist() == offsets["seven_token_example"]["input_lengths"]


def test_labels_are_the_assistants_tokens_of_the_same_conversation() -> None:
    first = Example(np.array([10, 11, 12, 13]), np.array([False, True, False, True]))
    (row,) = pack([first, owned(20, 21, 22)], 9, 0)
    no = IGNORED
    assert row_labels(row, 2).tolist() == [
        [11, no, 13],
        [no, 13, no],
        [13, no, no],
        [no, no, no],
        [21, 22, no],
        [22, no, no],
        [no, no, no],
        [no, no, no],
        [no, no, no],
    ]


def test_more_heads_than_tokens_have_no_labels() -> None:
    (row,) = pack([owned(1, 2, 3)], 3, 0)
    assert (row_labels(row, 5) != IGNORED).sum(axis=0).tolist() == [2, 1, 0, 0, 0, 0]


def test_loss_is_the_weighted_sum_of_means_over_each_heads_own_labels() -> None:
    loss = combine(torch.tensor([6.0, 8.0, 5.0]), torch.tensor([3.0, 2.0, 0.0]), torch.tensor([1.0, 0.16, 0.128]))
    assert loss.item() == pytest.approx(2 + 0.16 * 4 + 0.128 * 5)  # without labels the sum is 0 anyway


def test_sums_equal_torchs_own_means() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 6, 9, generator=generator)
    labels = torch.tensor([3, IGNORED, 0, 8, IGNORED, 1])
    kept = labels != IGNORED
    mean = torch.nn.functional.cross_entropy(student[kept], labels[kept])
    assert cross_entropy_sum(student, labels).item() == pytest.approx(4 * mean.item(), rel=1e-6)
    categorical = torch.distributions.Categorical
    expected = torch.distributions.kl_divergence(categorical(logits=teacher[kept]), categorical(logits=student[kept]))
    assert divergence_sum(teacher, student, labels).item() == pytest.approx(expected.sum().item(), rel=1e-5)
    assert divergence_sum(student, student, labels).item() == 0


def test_hits_count_the_best_and_the_best_five() -> None:
    logits = torch.arange(8.0).expand(4, 8)  # token 7 is the best, 3 the fifth
    assert hits(logits, torch.tensor([7, 3, 2, IGNORED])).tolist() == [1, 2]
