"""What the comparison of an engine with its checkpoint finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Difference:
    """Where an engine and the checkpoint part.

    Attributes:
        kind: `logits`, `token`, `acceptance`, `cache` or `draft`.
        fault: False for a near-tie.
        round: 0 for the prompt.
        row, path, position: packed row, ranks from the root to it, logical position.
        reason: one sentence.
        engine_token, reference_token: what each chose behind the row; where that is not what differs, the checkpoint's
            best token and its runner-up.
        engine_logits, reference_logits: of these two tokens; None where the engine does not give its logits.
        margin: the checkpoint's logit of its own token less that of the other.
        near_tie_margin: up to which it is a near-tie.
    """

    kind: str
    fault: bool
    round: int
    row: int
    path: tuple[int | str, ...]
    position: int
    reason: str
    engine_token: int | None = None
    reference_token: int | None = None
    engine_logits: tuple[float, float] | None = None
    reference_logits: tuple[float, float] | None = None
    margin: float | None = None
    near_tie_margin: float | None = None


class Compared(NamedTuple):
    """What the comparison of one pass found.

    Attributes:
        differences: near-ties and at most one fault, the last; where one is found, what depends on it is not compared.
        rows: that had logits compared.
        absolute, relative: the largest errors of the logits, the second in units of the row's largest; None without.
        cache: the largest error in the cache, in units of the layer's largest.
        draft_near_ties: drafts that are others at a near-tie of the heads' logits.
    """

    differences: list[Difference]
    rows: int
    absolute: float | None
    relative: float | None
    cache: float = 0.0
    draft_near_ties: int = 0
