"""The lines that tell on standard error what a command is doing, and how long it took."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stage(what: str, *, decimals: int = 0) -> Iterator[None]:
    """Print `what ...`, and behind it the seconds that the block took; the line ends there if the block raises."""
    started = time.perf_counter()
    print(f"{what} ...", end=" ", file=sys.stderr, flush=True)
    try:
        yield
    except BaseException:
        print(file=sys.stderr)
        raise
    print(f"{time.perf_counter() - started:.{decimals}f} s", file=sys.stderr, flush=True)
