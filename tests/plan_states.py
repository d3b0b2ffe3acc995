"""What a session of a plan holds, read from where the stand-ins keep it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from cache_invariants import TOLERANCE, Arrays

from medusa_engine.runtime.tensorrt_backend import TensorRtState

HALF_TOLERANCE = 2e-2  # of fp16, in units of keys and values, which are about 1


def check_plan_cache(state: TensorRtState, token_ids: Sequence[int], prefill: Arrays) -> None:
    """Check that the rows of these tokens, committed or pending, are those of a fresh prefill; others are finite.

    Args:
        prefill: of those tokens, or of more that begin with them.
    """
    state._drain()
    state._device._cuda.synchronize(state._device.stream)
    last = state._last
    rows = [*range(last.past_length), *(last.past_length + last.pending_rows[: last.pending_count])]
    assert len(rows) >= len(token_ids), f"{len(rows)} rows for {len(token_ids)} tokens"
    for name, expected in prefill.items():
        array = device_array(state, name)
        assert np.isfinite(array).all()
        difference = np.abs(array[:, :, rows[: len(token_ids)]] - expected[:, :, : len(token_ids)])
        tolerance = TOLERANCE if array.dtype == np.float32 else HALF_TOLERANCE
        assert difference.size == 0 or difference.max() <= tolerance, name


def device_array(state: TensorRtState, name: str) -> Any:
    buffers = state._device.buffers
    place = buffers.places[name]
    pointer = ctypes.cast(buffers.address(name), ctypes.POINTER(ctypes.c_uint8))
    return np.ctypeslib.as_array(pointer, (place.count,)).view(place.dtype).reshape(place.shape)
