"""A hidden folder beside an output: it is written into, and goes however the work ends."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from medusa_engine.runtime.errors import UserError


@contextlib.contextmanager
def write_errors(target: Path, what: str) -> Iterator[None]:
    """Turn the system's refusal to write `target`, a `what`, into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{target}: cannot write the {what}: {error.strerror or error}",
            "free space or change the permissions there, or give another --output",
        ) from error


@contextlib.contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """`.NAME.partial-…` beside `target`, locked while the block runs; what killed runs left of that name goes first."""
    prefix = f".{target.name}.partial-"
    for abandoned in target.parent.glob(f"{glob.escape(prefix)}*"):
        with _held(abandoned) as held:
            if held:
                shutil.rmtree(abandoned, ignore_errors=True)
    partial = target.parent / f"{prefix}{secrets.token_hex(4)}"
    partial.mkdir()
    try:
        with _held(partial):
            yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Lock a folder, which ends with this process however it ends; False if it is another's or cannot be locked."""
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except OSError:
            held = False
        yield held
