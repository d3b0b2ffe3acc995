"""What a built wheel holds, and that light commands stay light."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from documents import DOCUMENTS, ROOT

CODE_FOLDERS = ("benchmarks", "exporter", "heads", "plugins", "runtime", "training", "trees")
DATA_PATTERNS = (
    "trees/*.json",
    "plugins/**/*.cu",
    "plugins/**/*.cuh",
    "heads/*/*.safetensors",
    "heads/*/*.json",
    "benchmarks/prompts/*.json",
)
HEAVY = (
    *("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "onnxruntime", "tokenizers"),
    *("tensorrt", "tensorrt_rtx", "cuda"),
    *("accelerate", "gguf", "huggingface_hub", "peft", "safetensors"),
    *("matplotlib", "tqdm", "prometheus_client", "starlette", "uvicorn"),
)
SCRIPTS = sorted(
    script.name
    for script in importlib.metadata.distribution("medusa-engine").entry_points
    if script.group == "console_scripts"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by way of the source distribution from a copy without earlier builds' leftovers."""
    source = tmp_path_factory.mktemp("source") / "medusa-engine"
    output = tmp_path_factory.mktemp("dist")
    left_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "engines", "typings")
    shutil.copytree(ROOT, source, ignore=left_out)
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output), str(source)])
    (path,) = output.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run([*pip, "--no-index", "--no-deps", "--target", str(target), str(wheel)])
    return target


def test_wheel_holds_every_module_tree_kernel_and_head(wheel: Path) -> None:
    modules = {path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*.py")}
    data = {path for pattern in DATA_PATTERNS for path in ROOT.glob(pattern)}
    assert any(path.suffix == ".json" for path in data), "no tree found to look for"

    expected = {f"medusa_engine/{path.relative_to(ROOT).as_posix()}" for path in modules | data}
    assert files_of(wheel) == expected


def test_extras_are_installed_from_a_clone() -> None:
    """No index has the project: what messages and documents say to install is an extra of the clone's."""
    files = [*DOCUMENTS, *(path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*.py"))]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    assert [path for path, text in texts.items() if re.search(r"install\s+'?medusa-engine", text)] == []
    extras = set(importlib.metadata.metadata("medusa-engine").get_all("Provides-Extra") or ())
    named = {extra for text in texts.values() for extra in re.findall(r"'\.\[([a-z-]+)\]'", text)}
    assert {"tensorrt", "tensorrt-rtx"} < named <= extras


def test_wheel_adds_no_top_level_name_but_the_namespace(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        top_level = {name.split("/")[0] for name in archive.namelist()}
    assert top_level == {
        "medusa_engine",
        f"medusa_engine-{importlib.metadata.version('medusa-engine')}.dist-info",
    }
    assert "medusa_engine/__init__.py" not in files_of(wheel)


def test_installed_wheel_is_what_python_finds(wheel: Path, installed: Path) -> None:
    modules = sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in files_of(wheel)
        if name.endswith(".py")
    )
    code = (
        "import importlib.util, sys\n"
        "for name in sys.argv[1:]:\n"
        "    print(name, importlib.util.find_spec(name).origin)\n"
    )
    found = dict(line.split(" ", 1) for line in python(code, *modules, path=installed).splitlines())
    assert sorted(found) == modules
    assert {name: origin for name, origin in found.items() if not origin.startswith(f"{installed}{os.sep}")} == {}


def test_installed_wheel_reads_its_own_trees(installed: Path) -> None:
    code = (
        "from importlib.resources import files\n"
        "for path in files('medusa_engine.trees').iterdir():\n"
        "    if path.name.endswith('.json'):\n"
        "        print(path, len(path.read_bytes()))\n"
    )
    sizes = {path.name: path.stat().st_size for path in (ROOT / "trees").glob("*.json")}
    lines = [line.rsplit(" ", 1) for line in python(code, path=installed).splitlines()]
    assert {Path(path).parent for path, _ in lines} == {installed / "medusa_engine" / "trees"}
    assert {Path(path).name: int(size) for path, size in lines} == sizes


def test_importing_the_installed_runtime_loads_nothing_heavy(installed: Path) -> None:
    code = "import medusa_engine.runtime as module\nprint(module.__file__)\n"
    file, loaded = python(code + report_heavy(), path=installed).splitlines()
    assert Path(file).is_relative_to(installed)
    assert loaded == "loaded:"


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_of_each_command_loads_nothing_heavy(script: str) -> None:
    code = (
        "import importlib.metadata, sys\n"
        "(script,) = importlib.metadata.entry_points(group='console_scripts', name=sys.argv[1])\n"
        "sys.argv = [sys.argv[1], '--help']\n"
        "try:\n"
        "    status = script.load()()\n"
        "except SystemExit as stop:\n"
        "    status = stop.code\n"
        "print('status:', status or 0)\n"
    )
    *text, status, loaded = python(code + report_heavy(), script).splitlines()
    assert script in " ".join(text)
    assert (status, loaded) == ("status: 0", "loaded:")


def files_of(wheel: Path) -> set[str]:
    """The files of the wheel, without its own metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    return {name for name in names if not name.endswith("/") and ".dist-info/" not in name}


def report_heavy() -> str:
    """Code that prints which heavy libraries the process has loaded."""
    return f"import sys\nprint(' '.join(['loaded:', *(name for name in {HEAVY!r} if name in sys.modules)]))\n"


def python(code: str, *arguments: str, path: Path | None = None) -> str:
    """The standard output of code, run by this Python with path searched before all else."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return run([sys.executable, "-P", "-c", code, *arguments], environment)


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    result = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout
