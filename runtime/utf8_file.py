"""Read a UTF-8 text file exactly as it is written."""

from __future__ import annotations

from pathlib import Path

from medusa_engine.runtime.errors import UserError

MAX_BYTES = 1 << 26
_READ_BYTES = 1 << 16


def read_utf8_file(path: Path, *, hint: str) -> str:
    """Return the text of a UTF-8 file: newlines, trailing spaces and a byte order mark are kept.

    Args:
        path: the file.
        hint: what to do when the bytes are not UTF-8.

    Raises:
        UserError: the file cannot be read, is larger than MAX_BYTES, or is not UTF-8; names the file, and the byte
            offset.
    """
    data = bytearray()
    try:
        with path.open("rb") as file:
            while len(data) <= MAX_BYTES and (block := file.read(_READ_BYTES)):
                data += block
    except OSError as error:
        raise UserError(f"{path}: cannot read the file: {error.strerror or error}", "check the path") from error
    if len(data) > MAX_BYTES:
        raise UserError(f"{path}: the file is larger than {MAX_BYTES} bytes", "give a shorter text")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}", hint
        ) from error
