"""What a session's cache and its next prompt have in common."""

from __future__ import annotations

from collections.abc import Sequence


def shared_length(held: Sequence[int], prompt_ids: Sequence[int]) -> int:
    """Tokens with which both begin, less than the prompt has: its last token is run, for the logits behind it."""
    most = min(len(held), max(len(prompt_ids) - 1, 0))
    return next((index for index in range(most) if held[index] != prompt_ids[index]), most)
