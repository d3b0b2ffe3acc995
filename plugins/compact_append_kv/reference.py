"""`medusa::CompactAppendKV` in numpy: the oracle for the ONNX body and the CUDA kernel."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def compact_append_kv(
    past: npt.NDArray[np.generic],
    new: npt.NDArray[np.generic],
    past_length: int,
    pending_rows: npt.NDArray[np.int64],
    pending_count: int,
) -> npt.NDArray[np.generic]:
    """Move the accepted rows behind the committed ones, append the new rows behind them.

    present[P + j] = past[P + pending_rows[j]] for j < G (all sources read before any write),
    present[P + G + u] = new[u] for u < N.

    Args:
        past: [1, H_kv, S_max, head_dim], keys or values of one layer; not modified.
        new: [1, H_kv, N, head_dim], same dtype.
        past_length: P, committed rows.
        pending_rows: [D+1] packed rows of the previous pass; entries at and past G are ignored.
        pending_count: G.

    Returns:
        [1, H_kv, S_max, head_dim]: a copy with rows P ... P+G+N-1 written.

    Raises:
        ValueError: rows would be written past S_max.
    """
    end = past_length + pending_count + new.shape[2]
    if end > past.shape[2]:
        raise ValueError(f"rows up to {end} do not fit a cache of {past.shape[2]} rows")
    present = past.copy()
    staged = past_length + pending_rows[:pending_count]
    present[:, :, past_length : past_length + pending_count] = past[:, :, staged]
    present[:, :, past_length + pending_count : end] = new
    return present
