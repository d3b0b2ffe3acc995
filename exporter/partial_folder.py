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
    partial = target.parent / f"{prefix}{secrets.token_hex(4)}"
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, partial, ignore_errors=True)
        # Another run may begin now: what it finds without a lock it takes for abandoned.
        with held(target.parent, wait=True) as alone:
            if alone:
                _remove_abandoned(target.parent, prefix)
            partial.mkdir()
            stack.enter_context(held(partial))
        yield partial


def sync(folder: Path) -> None:
    """Let the disk have every file of a folder before a name leads to them."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def held(folder: Path, *, wait: bool = False) -> Iterator[bool]:
    """Lock a folder, which ends with this process however it ends; False if it cannot be locked.

    Args:
        wait: for as long as it is another's; else that is False, too.
    """
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except OSError:
            locked = False
        yield locked


def _remove_abandoned(folder: Path, prefix: str) -> None:
    for abandoned in folder.glob(f"{glob.escape(prefix)}*"):
        with held(abandoned) as alone:
            if alone:
                shutil.rmtree(abandoned, ignore_errors=True)
