"""The CUDA kernel of `medusa::CompactAppendKV`: its source, its name and how it is launched.

    compact_append_kv(past_key, past_value, new_key, new_value, past_length, pending_rows, pending_count,
                      int32 cache_rows, int32 new_rows, int32 row_bytes, int32 slots, present_key, present_value)

Pointers are to device memory as in body.py, contiguous, any type of 2 or 4 bytes; past_* and present_* are the same
buffers. Rows outside the cache are neither read nor written.
"""

from __future__ import annotations

from importlib.resources import files

ENTRY = "compact_append_kv"
THREADS = 256  # per block, one dimension
SLICE_BYTES = 64  # of every row, owned by one block; kSliceBytes of the source
MAX_SLOTS = 48 * 1024 // SLICE_BYTES  # D+1: what fits the shared memory that every device has


def source() -> str:
    """Return the CUDA C++ source."""
    return (files(__package__) / "compact_append_kv.cu").read_text(encoding="utf-8")


def grid(heads: int, row_bytes: int) -> tuple[int, int, int]:
    """Return the blocks of a launch: (slices of a row, key/value heads, keys and values)."""
    return -(-row_bytes // SLICE_BYTES), heads, 2


def shared_bytes(slots: int) -> int:
    """Return the dynamic shared memory of a block in bytes.

    Args:
        slots: D+1, the length of pending_rows.
    """
    return slots * SLICE_BYTES


def scalars(cache_rows: int, new_rows: int, row_bytes: int, slots: int) -> tuple[int, int, int, int]:
    """Return the int32 arguments in the kernel's order: S_max, N, head_dim x bytes per number, D+1."""
    return cache_rows, new_rows, row_bytes, slots
