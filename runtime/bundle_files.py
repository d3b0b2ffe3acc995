"""The check that every file of a bundle is the one that was exported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.file_place import check_inside
from medusa_engine.runtime.manifest import COPY_HINT, Manifest, file_sha256


def verify_files(folder: Path, manifest: Manifest, *, hashes: bool = True) -> None:
    """Compare every file of the bundle with the manifest.

    Args:
        hashes: also read the files and compare sha256; sizes alone otherwise.

    Raises:
        UserError: a file is missing, a link out of the bundle, of another size, or of other content; names it.
    """
    for name, facts in manifest.files.items():
        verify_file(folder / name, facts, hashes=hashes)


def verify_file(
    path: Path,
    facts: Mapping[str, Any],
    *,
    hashes: bool,
    listed_in: str = "the bundle's manifest",
    made: str = "the export",
    hint: str = COPY_HINT,
) -> None:
    """Compare a file with its {"bytes", "sha256"} in what lists it.

    Raises:
        UserError: as `verify_files`.
    """
    check_inside(path)
    if not path.is_file():
        raise UserError(f"{listed_in} lists this file, but it is missing", hint, file=path)
    try:
        size = path.stat().st_size
        sha256 = file_sha256(path) if hashes and size == facts["bytes"] else None
    except OSError as error:
        raise UserError(f"cannot read the file: {error.strerror or error}", "check the file", file=path) from error
    if size != facts["bytes"]:
        state = "cut short" if size < facts["bytes"] else "too long"
        raise UserError(f"{state}: {counted(size, 'byte')} instead of {facts['bytes']}", hint, file=path)
    if sha256 not in (None, facts["sha256"]):
        raise UserError(f"changed since {made} (its sha256 differs)", hint, file=path)
