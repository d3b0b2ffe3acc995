"""Compare an answer with transformers' greedy one, token for token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

NEAR_TIE = 1e-4  # logits closer than this may be ordered either way by two correct fp32 implementations


def check_greedy(token_ids: Sequence[int], reference: Sequence[int], prompt_ids: Sequence[int], model: Any) -> None:
    """Check that two answers are equal up to a near-tie of transformers' own logits, if there is one.

    Args:
        token_ids: the answer under test.
        reference: transformers' greedy answer.
        model: what gives the margin where they part.

    Raises:
        AssertionError: another length, or they part where transformers is not undecided.
    """
    assert len(token_ids) == len(reference), f"{len(token_ids)} tokens instead of {len(reference)}"
    if list(token_ids) == list(reference):
        return
    index = next(i for i, pair in enumerate(zip(token_ids, reference, strict=True)) if pair[0] != pair[1])
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt_ids, *reference[:index]]])).logits[0, -1]
    margin = float(logits[reference[index]] - logits[token_ids[index]])
    assert abs(margin) < NEAR_TIE, (
        f"token {index} is {token_ids[index]} instead of {reference[index]}, whose logit is larger by {margin:.2e}"
    )
