"""The files that a manifest or a plan's sidecar lists: plain names, each with what the file is verified by."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.strict_json import shown

_LONGEST_NAME = 100


def listed_files(values: Mapping[str, Any], path: Path | str, hint: str) -> dict[str, Mapping[str, Any]]:
    """Check `files`: plain names, each with its size in bytes and its sha256.

    Args:
        values: as the document has them.
        path: of the document, for messages.
        hint: the command that writes it again.

    Raises:
        UserError: a name leads out of the folder, or a size or hash is missing.
    """
    for name, facts in values.items():
        check_plain_name(name, path, hint)
        if not isinstance(facts, dict) or type(facts.get("bytes")) is not int:
            raise UserError(f'{path}: "files.{name}" does not give the size in bytes', hint)
        if not isinstance(facts.get("sha256"), str):
            raise UserError(f'{path}: "files.{name}" does not give the sha256', hint)
    return dict(values)


def check_plain_name(name: str, path: Path | str, hint: str) -> None:
    """Refuse the name of a file that may lie outside the folder.

    Raises:
        UserError: it does.
    """
    # Names that are too long for the system are errors of every call.
    if name in ("", ".", "..") or len(name) > _LONGEST_NAME or any(character in name for character in "/\\\0"):
        raise UserError(f"{path}: {shown(name)} is not the plain name of a file in the bundle", hint)
