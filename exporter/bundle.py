"""Write a bundle so that it exists completely or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import MANIFEST_NAME, Manifest, file_sha256


def check_target(target: Path, *, force: bool) -> None:
    """Refuse an output that exists, unless it is a bundle (or an empty folder) and may be replaced.

    Raises:
        UserError: names the folder.
    """
    if not target.exists() and not target.is_symlink():
        return
    if not target.is_dir() or (any(target.iterdir()) and not (target / MANIFEST_NAME).is_file()):
        raise UserError(f"{target}: exists and is not a bundle", "give another --output")
    if any(target.iterdir()) and not force:
        raise UserError(f"{target}: the bundle exists already", "give --force to replace it, or another --output")


@contextlib.contextmanager
def new_bundle(target: Path) -> Iterator[Path]:
    """A folder beside `target` to write into; it becomes `target` when the block ends, and goes if it fails.

    The bundle that was there is kept until the new one is complete.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        _put_in_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def file_facts(folder: Path) -> dict[str, dict[str, int | str]]:
    """Size and sha256 of every file in a folder, as the manifest lists them."""
    return {path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in sorted(folder.iterdir())}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, the last file of a bundle: a folder without it is not a bundle."""
    text = json.dumps(manifest.document(), indent=2, ensure_ascii=False) + "\n"
    (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")


def _put_in_place(partial: Path, target: Path) -> None:
    for path in partial.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    replaced = target.parent / f".{target.name}.replaced-{os.getpid()}"
    if target.exists():
        target.rename(replaced)
    partial.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
