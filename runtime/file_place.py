"""Files that another file names: they have to lie where it does."""

from __future__ import annotations

from pathlib import Path

from medusa_engine.runtime.errors import UserError


def check_inside(path: Path) -> None:
    """Refuse a file that a link leads out of the folder it is in.

    The links of the hub's cache are fine: a snapshot's files lie in the `blobs` of its repository.

    Args:
        path: folder and plain name of the file, which may be missing.

    Raises:
        UserError: names the file and where it leads.
    """
    if not path.is_symlink():
        return
    try:
        folder, real = path.parent.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:  # the second for links in a circle
        raise UserError(f"{path}: cannot follow the link", "put the file itself there") from error
    blobs = folder.parents[1] / "blobs" if folder.parent.name == "snapshots" else folder
    if not real.is_relative_to(folder) and not real.is_relative_to(blobs):
        raise UserError(f"{path}: a link that leads out of the folder, to {real}", "put the file itself there")
