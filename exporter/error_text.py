"""What a library says of an error, in one line."""

from __future__ import annotations

import re


def first_line(error: Exception) -> str:
    """The first line of what an error says, without terminal colours; with its kind where that is a word or nothing."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    line, *more = text.splitlines() or [""]
    if line.endswith(":") and more:  # the reason is on the next one
        line = f"{line} {more[0].strip()}"
    return line if " " in line else f"{type(error).__name__}: {line}".removesuffix(": ")
