"""Write a bundle so that it exists completely or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from medusa_engine.exporter.partial_folder import held, partial_folder, sync, write_errors
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.generation_config import read_stop_token_ids
from medusa_engine.runtime.manifest import (
    FORMAT,
    GENERATION_NAME,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    file_sha256,
    read_manifest,
)
from medusa_engine.runtime.tree import load_tree

# <fcntl.h> and <linux/fs.h>
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def check_target(target: Path, *, force: bool) -> None:
    """Refuse an output that cannot be written or exists, unless it is a bundle (or an empty folder) and may go.

    Raises:
        UserError: names the folder.
    """
    with write_errors(target, "bundle"):
        if not target.exists() and not target.is_symlink():
            folder = next(parent for parent in target.absolute().parents if parent.exists())
            if not folder.is_dir():
                raise UserError(f"{target}: {folder} is not a folder", "give another --output")
            if not os.access(folder, os.W_OK | os.X_OK):
                raise UserError(f"{target}: no permission to write into {folder}", "give another --output")
            return
        if not target.is_dir() or (any(target.iterdir()) and not _is_bundle(target)):
            raise UserError(f"{target}: exists and is not a bundle", "give another --output")
        if any(target.iterdir()) and not force:
            raise UserError(f"{target}: the bundle exists already", "give --force to replace it, or another --output")


@contextlib.contextmanager
def new_bundle(target: Path, *, force: bool = True) -> Iterator[Path]:
    """A folder beside `target` to write into; it becomes `target` when the block ends, and goes if it fails.

    The bundle that was there is kept until the new one is complete. What a killed export left beside `target` goes.

    Raises:
        UserError: the system refuses to write.
    """
    target = target.resolve()  # of a link, the folder it points to is replaced
    with write_errors(target, "bundle"), _parents(target), partial_folder(target) as partial:
        yield partial
        sync(partial)
        with held(target.parent, wait=True):
            check_target(target, force=force)  # again: something may have come there meanwhile
            _put_in_place(partial, target)


def file_facts(folder: Path) -> dict[str, dict[str, int | str]]:
    """Size and sha256 of every file in a folder, as the manifest lists them."""
    return {path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in sorted(folder.iterdir())}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, the last file of a bundle: a folder without it is not a bundle."""
    text = json.dumps(manifest.document(), indent=2, ensure_ascii=False) + "\n"
    (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")


def check_readable(folder: Path) -> None:
    """Read the manifest, the stop tokens and the trees of a finished bundle as whatever opens it does.

    Raises:
        UserError: the runtime refuses one of them.
    """
    manifest = read_manifest(folder)
    read_stop_token_ids(folder / GENERATION_NAME)
    for name in manifest.trees:
        load_tree(folder / name)


def _is_bundle(folder: Path) -> bool:
    """Whether the manifest says so; other programs have a `manifest.json` too."""
    try:
        with (folder / MANIFEST_NAME).open("rb") as file:
            document = json.loads(file.read(MAX_MANIFEST_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("format") == FORMAT


@contextlib.contextmanager
def _parents(target: Path) -> Iterator[None]:
    """The folders above `target`; those that had to be made go again if the block fails."""
    made = [parent for parent in target.parents if not parent.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # something else is in there by now
            for parent in made:
                parent.rmdir()
        raise


def _put_in_place(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
    elif not _exchange(partial, target):
        replaced = target.with_name(partial.name.replace(".partial-", ".replaced-"))
        try:
            target.rename(replaced)
            partial.rename(target)
        except BaseException:
            if not target.exists():
                replaced.rename(target)
            raise
        shutil.rmtree(replaced, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change names in one step; False where the system or its file system has no such step."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "renameat2"):
        return False
    names = _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other)
    return bool(libc.renameat2(*names, _RENAME_EXCHANGE) == 0)
