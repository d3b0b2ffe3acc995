"""Put a plan on disk: NAME.plan, NAME.plan.files and, last, NAME.plan.json; all of it or nothing."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from medusa_engine.exporter.partial_folder import partial_folder, write_errors
from medusa_engine.runtime.bundle_files import verify_file
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import WEIGHTS_NAME, Manifest
from medusa_engine.runtime.plan import FORMAT, files_folder, sidecar_path

_ANOTHER = "give another --output"
_MAX_SIDECAR_BYTES = 2 << 20


def check_plan_target(path: Path, *, force: bool) -> None:
    """Refuse an output that cannot be written or exists, unless it is a plan with its sidecar and may go.

    Raises:
        UserError: names the file or folder.
    """
    with write_errors(path, "plan"):
        folder = path.parent
        if not folder.is_dir():
            what = "is not a folder" if folder.exists() else "does not exist"
            raise UserError(f"{path}: the folder {folder} {what}", f"make it, or {_ANOTHER}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"{path}: no permission to write into {folder}", _ANOTHER)
        found = [part for part in _parts(path) if os.path.lexists(part)]
        if not found:
            return
        if not _is_plan(path):
            raise UserError(f"{found[0]}: exists and is no plan of medusa-build", f"remove it, or {_ANOTHER}")
        if not force:
            raise UserError(f"{path}: the plan exists already", f"give --force to replace it, or {_ANOTHER}")


@contextlib.contextmanager
def new_plan(path: Path, *, force: bool) -> Iterator[Path]:
    """Where to write a plan of the same name, its sidecar and its files; they come to `path` when the block ends.

    The plan that was there is kept until then, and if the block fails.

    Raises:
        UserError: the system refuses to write.
    """
    path = path.resolve()
    with write_errors(path, "plan"), partial_folder(path) as partial:
        files_folder(partial / path.name).mkdir()
        yield partial / path.name
        check_plan_target(path, force=force)  # again: something may have come there meanwhile
        _put_in_place(partial / path.name, path)


def companion_names(manifest: Manifest) -> list[str]:
    """Files of a bundle that the runtime reads beside the graphs."""
    left_out = {*manifest.graphs.values(), WEIGHTS_NAME}
    return [name for name in manifest.files if name not in left_out]


def copy_companions(bundle: Path, manifest: Manifest, folder: Path) -> None:
    """Copy them into the folder of a plan.

    Raises:
        UserError: one is not what the manifest says.
    """
    for name in companion_names(manifest):
        shutil.copyfile(bundle / name, folder / name)
        verify_file(
            folder / name,
            manifest.files[name],
            hashes=True,
            listed_in="the bundle's manifest",
            made="the export",
            hint="build the plan again, and leave the bundle alone meanwhile",
        )


def _parts(path: Path) -> tuple[Path, Path, Path]:
    """A plan's three parts; the sidecar, without which the others are no plan, is the first to go and last to come."""
    return sidecar_path(path), files_folder(path), path


def _is_plan(path: Path) -> bool:
    sidecar, files, plan = _parts(path)
    if (os.path.lexists(plan) and not plan.is_file()) or (os.path.lexists(files) and not files.is_dir()):
        return False
    try:
        with sidecar.open("rb") as file:
            document = json.loads(file.read(_MAX_SIDECAR_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("format") == FORMAT


def _put_in_place(new: Path, path: Path) -> None:
    parts = _parts(new)
    for part in (*parts[1].iterdir(), parts[0], parts[2]):
        with part.open("rb") as file:
            os.fsync(file.fileno())
    old = new.parent / "replaced"
    old.mkdir()
    moves = [(there, old / there.name) for there in _parts(path) if os.path.lexists(there)]
    moves += [(part, there) for part, there in reversed(list(zip(parts, _parts(path), strict=True)))]
    with contextlib.ExitStack() as undo:
        for source, target in moves:
            os.rename(source, target)
            undo.callback(os.rename, target, source)
        undo.pop_all()
