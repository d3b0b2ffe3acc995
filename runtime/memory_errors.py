"""Which errors say that memory ran out: each library says it in its own words."""

from __future__ import annotations

import errno

NO_MEMORY = "not enough memory"  # in what users are told
MEMORY_HINT = "free memory, or take a smaller model"

# Of C++ libraries, ONNX Runtime, torch and the system, GPUs, threads, what ONNX Runtime makes of a MemoryError, and
# of libraries that are loaded.
_WORDS = (
    "bad_alloc",
    "Failed to allocate memory",
    "allocate memory",
    "out of memory",
    "can't start new thread",
    "MemoryError",
    "annot allocate",
    "failed to map segment",
    "cannot map zero-fill pages",
    "cannot create shared object descriptor",
)


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one that it was raised from or while handling, says that memory ran out."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return True
        if any(words in str(error) for words in _WORDS):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
