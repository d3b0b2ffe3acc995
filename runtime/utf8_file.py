"""Read a UTF-8 text file exactly as it is written."""

from __future__ import annotations

from pathlib import Path

from medusa_engine.runtime.errors import UserError


def read_utf8_file(path: Path, *, hint: str) -> str:
    """Return the text of a UTF-8 file: newlines, trailing spaces and a byte order mark are kept.

    Args:
        path: the file.
        hint: what to do when the bytes are not UTF-8.

    Raises:
        UserError: the file cannot be read, or is not UTF-8; names the file and the byte offset.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot read the file: {error.strerror or error}", "check the path") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}", hint
        ) from error
