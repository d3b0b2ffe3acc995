"""Commands work with the packages that their installation brings; that they start is in test_packaging.py."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiny_models import Exported

ROOT = Path(__file__).parents[1]
# What the extras bring beside the base installation, as it is imported.
MODULES = {
    "cuda-bindings": "cuda",
    "prometheus-client": "prometheus_client",
    "protobuf": "google.protobuf",
    "tensorrt-rtx-cu13": "tensorrt_rtx",
}
RUN = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from importlib.metadata import entry_points
(entry,) = [entry for entry in entry_points(group="console_scripts") if entry.name == sys.argv[2]]
main = entry.load()
sys.argv[:] = sys.argv[2:]
sys.exit(main())
"""


def missing_beside(*extras: str) -> str:
    """Modules of all extras but these."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def modules(names: tuple[str, ...]) -> set[str]:
        packages = {entry.split(">=")[0].split("[")[0] for name in names for entry in known[name]}
        return {MODULES.get(package, package) for package in packages} - {"medusa-engine", "setuptools"}

    used = ("export", "bench", "serve", "train", "tensorrt", "tensorrt-rtx")
    assert modules(("export",)) > {"torch", "safetensors", "onnx"}
    return ",".join(sorted(modules(used) - modules(extras)))


def run(command: str, *arguments: str | Path, extras: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", RUN, missing_beside(*extras), command, *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120)


def test_a_tree_is_shown_with_the_base_installation() -> None:
    done = run("medusa-tree", "show", "4")
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 nodes" in done.stdout


def test_benchmarks_run_with_their_extra(own_heads: Exported, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text('{"writing": [[1, 2, 3]]}')
    options = ("--threads", 1, "--repeats", 1, "--max-new-tokens", 4, "--context", 16, "--sweep", "1,2")
    arguments = ("--engine", own_heads.bundle, *map(str, options), "--prompts", prompts)
    done = run("medusa-bench", *arguments, "--ledger", "--report", tmp_path / "page.html", extras=("bench",))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").stat().st_size > 10_000
