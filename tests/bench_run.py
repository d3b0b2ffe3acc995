"""What the run of medusa-bench that several tests look at was asked to do, and what it gave."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPTS = {"odd <&> category": [[1, 2, 3], [7]], "even": [[2, 4], [20, 21, 22, 23, 24], [40, 6]]}
REPEATS, MAX_NEW_TOKENS = 2, 20
SWEEP = [1, 2, 4, 8, 16]
CONTEXTS = [4, 24]
CHAIN_NAME = 'chain $x^{$ id="figure_1"'  # no formula, and no markup
CHAIN = [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]


@dataclass(frozen=True)
class Benched:
    """A run and its outputs."""

    text: str
    errors: str
    document: dict[str, Any]
    report: Path
    figures: Path
