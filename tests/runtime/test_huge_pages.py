"""The commands start again with the allocator told to use huge pages; what a user set stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROGRAM = """
import os, sys
from medusa_engine.runtime import cli
cli.run_command = lambda *_: print(os.environ.get("GLIBC_TUNABLES"), sys.argv[1:], os.getpid())
cli.main()
"""


def environment_of_the_command(tunables: str | None) -> tuple[str, str]:
    """GLIBC_TUNABLES and arguments as the command sees them behind its start."""
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    if tunables is not None:
        environment["GLIBC_TUNABLES"] = tunables
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "--prompt", "a b"], env=environment, stdout=subprocess.PIPE, text=True
    )
    out, _ = process.communicate(timeout=60)
    value, rest = out.split(" ", 1)
    arguments, pid = rest.rsplit(" ", 1)
    assert int(pid) == process.pid, "the program is the process that was started: signals reach it"
    return value, arguments


@pytest.mark.skipif(
    not ENABLED.exists() or "[madvise]" not in ENABLED.read_text(), reason="this kernel does not give pages on request"
)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.tcache_count=8", "glibc.malloc.tcache_count=8:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_the_command_runs_with_the_setting_and_its_own_arguments(before: str | None, after: str) -> None:
    assert environment_of_the_command(before) == (after, "['--prompt', 'a b']")
