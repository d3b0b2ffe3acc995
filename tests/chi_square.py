"""Pearson's test of counts against exact probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

LEAST_P = 1e-4

Floats = npt.NDArray[np.float64]


def chi_square_p(counts: npt.NDArray[Any], probabilities: Floats) -> float:
    """p-value of the counts; cells with fewer than five expected are pooled."""
    expected = probabilities * counts.sum()
    assert counts[expected == 0].sum() == 0, "a token without probability"
    few = expected < 5
    observed, expected = (np.append(values[~few], values[few].sum()) for values in (counts, expected))
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    statistic, freedom = ((observed - expected) ** 2 / expected).sum(), max(len(expected) - 1, 1)
    return float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2)))


def check_counts(counts: npt.NDArray[Any], probabilities: Floats) -> None:
    assert chi_square_p(counts, probabilities) > LEAST_P
