"""Memory that runs out is said in two lines that name what was loaded; no traceback, no abort."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from bundle_edits import edit_manifest
from checkpoints import save_llama, write_tree
from command_checks import check_refused, unchanged

from medusa_engine.runtime.memory_errors import ran_out_of_memory

# Leaves a process little more memory than it has when it comes to a function, whatever its libraries take.
TIGHT = """
import mmap, resource, sys
{imports}
function = {owner}.{name}

def tight(*arguments, **options):
    used = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + {left}, resource.RLIM_INFINITY))
    return function(*arguments, **options)

{owner}.{name} = tight
sys.exit(cli.main(sys.argv[1:]))
"""


RUN = """
from medusa_engine.runtime import cli
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.onnxruntime_backend import OnnxRuntimeBackend
"""
EXPORT = """
from medusa_engine.exporter import checkpoint, cli
"""


def run(imports: str, owner: str, name: str, *arguments: str | Path, left: int) -> subprocess.CompletedProcess[str]:
    program = TIGHT.format(imports=imports, owner=owner, name=name, left=left)
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def refuses(owner: str, name: str, bundle: Path, *named: str | Path, left: int = 1 << 17) -> None:
    ended = run(RUN, owner, name, "--engine", bundle, "--prompt-ids", "1,2,3", "--threads", "1", left=left)
    check_refused(ended.returncode, ended.stderr, "medusa-run", *named)


def test_too_little_to_open_a_bundle(plain_bundle: Path) -> None:
    refuses("Engine", "__init__", plain_bundle, plain_bundle, "not enough memory")


def test_too_little_to_load_a_graph(plain_bundle: Path) -> None:
    refuses("OnnxRuntimeBackend", "session", plain_bundle, plain_bundle / "round.onnx", "not enough memory")


def test_too_little_for_a_cache(plain_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(plain_bundle, tmp_path / "bundle"))
    edit_manifest(bundle, lambda document: document["limits"].update(cache_rows=1 << 24))
    refuses("OnnxRuntimeBackend", "new_state", bundle, bundle, "not enough memory for a cache", left=1 << 26)


def test_too_little_to_read_the_weights_of_an_export(plain_bundle: Path, tmp_path: Path) -> None:
    model, bundle = save_llama(tmp_path / "model"), tmp_path / "bundle"
    shutil.copytree(plain_bundle, bundle)
    tree = write_tree(tmp_path / "tree.json")
    options = ("--model", model, "--untrained-heads", "2", "--tree", tree, "--force", "-o", bundle)
    with unchanged(tmp_path):
        ended = run(EXPORT, "checkpoint", "load_model", *options, left=1 << 16)
    check_refused(ended.returncode, ended.stderr, "medusa-export", "not enough memory")
    assert "free memory" in ended.stderr


def test_other_errors_of_libraries_are_not_taken_for_it() -> None:
    assert not ran_out_of_memory(RuntimeError("shape mismatch"))
    assert not ran_out_of_memory(OSError(errno.ENOSPC, "No space left on device"))
    cause = RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory")
    error = ValueError("cannot load")
    error.__cause__ = cause
    assert ran_out_of_memory(error)


LOADING = """
import mmap, resource, sys
from medusa_engine.runtime import cli
{imports}
used = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 22), resource.RLIM_INFINITY))
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("imports", ["", "import numpy"])
def test_too_little_to_load_the_libraries(imports: str, plain_bundle: Path) -> None:
    program = LOADING.format(imports=imports)
    command = [sys.executable, "-c", program, "--engine", str(plain_bundle), "--prompt-ids", "1,2,3"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    check_refused(ended.returncode, ended.stderr, "medusa-run", "not enough memory")


def test_no_library_is_loaded_before_a_command_can_say_so() -> None:
    scripts = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    modules = [target.partition(":")[0] for target in scripts["project"]["scripts"].values()]
    program = f"import sys, {', '.join(modules)}\nprint('numpy' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout == "False\n"


@pytest.mark.parametrize(
    "words",
    [
        "libtorch_cpu.so: failed to map segment from shared object",
        "libgomp.so.1: cannot allocate memory in static TLS block",
        "libc.so.6: cannot map zero-fill pages",
        "x.so: cannot create shared object descriptor: Cannot allocate memory",
    ],
)
def test_a_library_that_cannot_be_loaded_for_want_of_memory(words: str) -> None:
    error = ModuleNotFoundError("torch is not installed", name="torch")  # as libraries say it
    error.__context__ = ImportError(words)
    assert ran_out_of_memory(error)
    assert not ran_out_of_memory(ImportError("libcuda.so.1: cannot open shared object file: No such file"))
