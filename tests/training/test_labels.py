"""Each head learns the token at its own offset, owned tokens only, never past the end of a conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medusa_engine.training.labels import IGNORED, head_labels, head_weights

ORACLES: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "oracles" / "worked_examples.json").read_text(encoding="utf-8")
)["training_offsets"]


def labels_of(rows: list[list[int]], heads: int, owned: list[bool] | None = None) -> Any:
    tokens = np.concatenate([np.array(row) for row in rows])
    mask = np.ones(len(tokens), dtype=np.bool_) if owned is None else np.array(owned)
    return head_labels(tokens, mask, np.array([len(row) for row in rows]), heads)


def test_head_j_learns_token_t_plus_j_plus_2() -> None:
    labels = labels_of([list(range(10, 18))], 3)
    for head, shift in enumerate(ORACLES["shift"]):
        assert labels[: 8 - shift, head].tolist() == list(range(10 + shift, 18))
        assert (labels[8 - shift :, head] == IGNORED).all()


def test_worked_label_counts() -> None:
    rows = [list(range(ORACLES["S"]))] * ORACLES["B"]
    counts = (labels_of(rows, ORACLES["heads"]) != IGNORED).sum(axis=0)
    assert counts.tolist() == ORACLES["geometric_label_counts"]


def test_worked_input_lengths_of_seven_tokens() -> None:
    example = ORACLES["seven_token_example"]
    counts = (labels_of([list(range(example["S"]))], 3) != IGNORED).sum(axis=0)
    assert counts.tolist() == example["input_lengths"]


def test_worked_head_weights() -> None:
    assert head_weights(3) == pytest.approx(np.array(ORACLES["head_weights_lambda_0_8"]))


def test_no_label_comes_from_the_next_conversation() -> None:
    labels = labels_of([[1, 2, 3], [4, 5, 6, 7]], 2)
    assert labels.tolist() == [
        [3, IGNORED],
        [IGNORED, IGNORED],
        [IGNORED, IGNORED],
        [6, 7],
        [7, IGNORED],
        [IGNORED, IGNORED],
        [IGNORED, IGNORED],
    ]


def test_only_owned_tokens_are_labels() -> None:
    labels = labels_of([[1, 2, 3, 4, 5]], 2, owned=[True, True, False, True, False])
    assert labels.tolist() == [
        [IGNORED, 4],
        [4, IGNORED],
        [IGNORED, IGNORED],
        [IGNORED, IGNORED],
        [IGNORED, IGNORED],
    ]


def test_a_conversation_nobody_owns_has_no_labels() -> None:
    assert (labels_of([[3, 4, 5, 6, 7, 8]], 3, owned=[False] * 6) == IGNORED).all()


def test_an_end_token_is_a_label_like_any_other() -> None:
    assert labels_of([[3, 4, 5, 6, 2]], 1)[:, 0].tolist() == [5, 6, 2, IGNORED, IGNORED]
