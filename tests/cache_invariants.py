"""What must hold between a state's key/value cache, the tokens published so far, and transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from medusa_engine.runtime.onnxruntime_state import OnnxRuntimeState

TOLERANCE = 1e-4

Arrays = dict[str, npt.NDArray[Any]]


def check_cache(state: OnnxRuntimeState, tokens: int, prefill: Arrays) -> None:
    """Check that committed and pending rows are those of a fresh prefill.

    Args:
        state: after a pass.
        tokens: of the prompt and everything published so far.
        prefill: of those tokens, or of more that begin with them.

    Raises:
        AssertionError: another number of rows, or a row that differs.
    """
    rows = cache_rows(state)
    assert len(rows) == tokens, f"{len(rows)} rows for {tokens} tokens"
    for name, expected in prefill.items():
        difference = np.abs(state.cache[name].numpy()[:, :, rows] - expected[:, :, :tokens])
        by_row = difference.max(axis=(0, 1, 3))  # [tokens]
        assert by_row.max() <= TOLERANCE, f"{name} differs by {by_row.max()} at {np.flatnonzero(by_row > TOLERANCE)}"


def cache_rows(state: OnnxRuntimeState) -> npt.NDArray[np.int64]:
    """Cache row of every published token: the committed ones, then the pending ones where they were staged."""
    slot = state.slot
    past_length, count = int(slot.past_length[0]), int(slot.pending_count[0])
    return np.concatenate([np.arange(past_length), past_length + slot.pending_rows[:count]])


def prefill_cache(model: Any, token_ids: Sequence[int]) -> Arrays:
    """`key.L` and `value.L` -> [1, H_kv, tokens, head_dim] of one forward pass of transformers."""
    with torch.inference_mode():
        cache = model(torch.tensor([list(token_ids)]), use_cache=True).past_key_values
    tensors = {}
    for index, layer in enumerate(cache.layers):
        tensors[f"key.{index}"] = layer.keys.numpy()
        tensors[f"value.{index}"] = layer.values.numpy()
    return tensors
