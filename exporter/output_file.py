"""Files that commands write: refused before the work if they cannot be written, and complete or not there at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from medusa_engine.exporter.error_text import first_line
from medusa_engine.runtime.errors import UserError


def check_output(path: Path, *, suffixes: Sequence[str] = (), option: str = "--output") -> None:
    """Refuse an output file that could not be written.

    Args:
        suffixes: endings that its name may have; empty for any.
        option: that it was given with.

    Raises:
        UserError: another ending, a folder, or a folder that is missing or closed to us.
    """
    if suffixes and path.suffix.lower() not in suffixes:
        ending = path.suffix or "a file without an ending"
        raise UserError(f"{path}: cannot write {ending}", f"end the name in {' or '.join(suffixes)}")
    if path.is_dir() or not path.name:
        raise UserError(f"{path}: is a folder", "give the name of a file")
    _check_place(path, path.absolute().parent, option)


def check_output_folder(path: Path, *, option: str) -> None:
    """Refuse a folder for output files that is not there and could not be made, or that could not be written to.

    Raises:
        UserError: a file, or a folder that is closed to us or stands in one that is missing or closed.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is not a folder", f"give another {option}")
    _check_place(path, path if path.is_dir() else path.absolute().parent, option)


def _check_place(path: Path, folder: Path, option: str) -> None:
    """Refuse an output whose folder is missing or closed."""
    if not folder.is_dir():
        raise UserError(f"{path}: its folder does not exist", f"make the folder, or give another {option}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{path}: no permission to write into {folder}", f"give another {option}")


@contextlib.contextmanager
def writing(path: Path, *, option: str = "--output", also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Name the file or folder when the system refuses to write there.

    Args:
        also: errors of a library that mean the same.

    Raises:
        UserError: it does.
    """
    try:
        yield
    except (OSError, *also) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise UserError(f"{path}: cannot write: {reason}", f"free space there, or give another {option}") from error


def write_file(path: Path, data: bytes, *, option: str = "--output") -> None:
    """Write beside `path` and put in place; a file that was there is replaced.

    Raises:
        UserError: the system refuses.
    """
    partial = path.with_name(f".{path.name}.partial")
    with writing(path, option=option):
        try:
            partial.write_bytes(data)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def make_folder(folder: Path, *, option: str = "--output") -> None:
    """Make an output folder, and those above it; one that exists is fine.

    Raises:
        UserError: the system refuses.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot make the folder: {error.strerror or error}", f"give another {option}"
        ) from error
