from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from greedy_check import NEAR_TIE, check_greedy

REFERENCE = [5, 6, 7]
PARTED = [5, 4, 0]


def model_with_margin(margin: float) -> Any:
    """A model whose logit of token 6 is larger than that of token 4 by `margin`, behind the prompt and token 5."""

    def forward(ids: torch.Tensor) -> SimpleNamespace:
        assert ids.tolist() == [[1, 2, 5]]
        logits = torch.zeros(1, 3, 8)
        logits[0, -1, 6] = margin
        return SimpleNamespace(logits=logits)

    return forward


def test_answers_that_part_where_transformers_is_sure_are_told_apart() -> None:
    with pytest.raises(AssertionError, match="token 1 is 4 instead of 6"):
        check_greedy(PARTED, REFERENCE, [1, 2], model_with_margin(2 * NEAR_TIE))


def test_answers_may_part_at_a_near_tie() -> None:
    check_greedy(PARTED, REFERENCE, [1, 2], model_with_margin(NEAR_TIE / 2))


def test_answers_of_different_lengths_are_told_apart() -> None:
    with pytest.raises(AssertionError, match="2 tokens instead of 3"):
        check_greedy(REFERENCE[:2], REFERENCE, [1, 2], None)
