"""Where an answer ends inside a pass, in numpy: the reference that an exported graph must reproduce."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


class Cut(NamedTuple):
    """What a pass publishes of the tokens it accepted, and what it leaves of the limits.

    Attributes:
        published: tokens, the root included.
        token_budget: tokens that may still be published.
        finished: the answer has ended: no later pass publishes anything.
    """

    published: int
    token_budget: int
    finished: bool


def cut(accepted: Sequence[int], *, stop_ids: Collection[int], token_budget: int, finished: bool) -> Cut:
    """Publish accepted tokens up to and with the first stop token, and no more than the budget; none if finished.

    Args:
        accepted: the root and the suffix that the pass accepted behind it.
        stop_ids: tokens that end the answer; -1 is none.
        token_budget: tokens that may be published, at least 0.
        finished: what the pass before left.
    """
    if finished:
        return Cut(0, token_budget, True)
    stop_end = next((index + 1 for index, token in enumerate(accepted) if token in stop_ids), None)
    count = min(len(accepted), token_budget, stop_end or len(accepted))
    return Cut(count, token_budget - count, count in (token_budget, stop_end))
