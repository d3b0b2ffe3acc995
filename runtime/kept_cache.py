"""The cache between two answers of a session: wound back to what the next prompt shares, or copied for a fork."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from medusa_engine.runtime.backend import SessionState


def shared_length(held: Sequence[int], prompt_ids: Sequence[int]) -> int:
    """Tokens with which both begin, less than the prompt has: its last token is run, for the logits behind it."""
    most = min(len(held), max(len(prompt_ids) - 1, 0))
    return next((index for index in range(most) if held[index] != prompt_ids[index]), most)


def wind_back(state: SessionState, tokens: int) -> None:
    """Let the cache hold its first `tokens` tokens only; rows of others are overwritten by the next pass.

    Tokens behind the P committed rows are still staged where their tree had them, and stay pending.
    """
    past_length = int(state.slot.past_length[0])
    pending = max(tokens - past_length, 0)
    assert pending <= state.slot.pending_count[0], "the cache holds fewer tokens"
    state.slot.past_length[0] = min(tokens, past_length)
    state.keep_pending(pending)


def copy_cache(source: SessionState, target: SessionState) -> None:
    """Copy every row that counts into an empty cache, pending rows as committed ones."""
    past_length, pending = int(source.slot.past_length[0]), int(source.slot.pending_count[0])
    rows = np.concatenate([np.arange(past_length), past_length + source.slot.pending_rows[:pending]])
    for name, buffer in source.cache.items():
        target.cache[name].numpy()[:, :, : len(rows)] = buffer.numpy()[:, :, rows]
    target.history[: len(rows)] = source.history[: len(rows)]
    target.slot.past_length[0] = len(rows)
