"""Memory that runs out is said in two lines that name what was loaded; no traceback, no abort."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from bundle_edits import edit_manifest
from command_checks import check_refused

# Leaves a process little more memory than it has when it comes to a function, whatever its libraries take.
TIGHT = """
import mmap, resource, sys
from medusa_engine.runtime import cli
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.onnxruntime_backend import OnnxRuntimeBackend

function = {owner}.{name}

def tight(*arguments, **options):
    used = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + {left}, resource.RLIM_INFINITY))
    return function(*arguments, **options)

{owner}.{name} = tight
sys.exit(cli.main(sys.argv[1:]))
"""


def refuses(owner: str, name: str, bundle: Path, *named: str | Path, left: int = 1 << 17) -> None:
    program = TIGHT.format(owner=owner, name=name, left=left)
    command = [sys.executable, "-c", program, "--engine", str(bundle), "--prompt-ids", "1,2,3", "--threads", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    check_refused(ended.returncode, ended.stderr, "medusa-run", *named)


def test_too_little_to_open_a_bundle(plain_bundle: Path) -> None:
    refuses("Engine", "__init__", plain_bundle, plain_bundle, "not enough memory")


def test_too_little_to_load_a_graph(plain_bundle: Path) -> None:
    refuses("OnnxRuntimeBackend", "session", plain_bundle, plain_bundle / "round.onnx", "not enough memory")


def test_too_little_for_a_cache(plain_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(plain_bundle, tmp_path / "bundle"))
    edit_manifest(bundle, lambda document: document["limits"].update(cache_rows=1 << 24))
    refuses("OnnxRuntimeBackend", "new_state", bundle, bundle, "not enough memory for a cache", left=1 << 26)
