"""Kernel timings kept in a file, which make the next build of the full library shorter."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from medusa_engine.exporter.build_log import Messages, essence
from medusa_engine.runtime.errors import UserError

_HINT = "give another --timing-cache FILE, or leave it out"


def read_timing_cache(path: Path) -> bytes:
    """The file's bytes; none if there is no such file yet.

    Raises:
        UserError: it cannot be read, or could not be written.
    """
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent} for the timing cache", _HINT)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise UserError(f"{path}: cannot read the timing cache: {error.strerror or error}", _HINT) from error


def attach_timing_cache(config: Any, data: bytes, messages: Messages) -> str | None:
    """Let a build use these timings, or an empty cache; returns why they are of no use, None if they are.

    Args:
        config: the library's builder configuration.
    """
    said = len(messages.errors)
    cache = config.create_timing_cache(data)
    attached = cache is not None and config.set_timing_cache(cache, ignore_mismatch=False)
    complaints = messages.errors[said:]
    del messages.errors[said:]  # no error of the build
    if attached and not complaints:
        return None
    config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)
    return essence(complaints[0]) if complaints else "of another GPU or another version of the library"


def write_timing_cache(config: Any, path: Path) -> str | None:
    """Write what the build has timed; returns why it could not, None if it did."""
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    try:
        partial.write_bytes(config.get_timing_cache().serialize())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        return error.strerror or str(error)
    return None
