"""End a text stream at the first stop string, however the text was cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.strict_json import shown

LONGEST_STOP_STRING = 1024  # characters: as much text may be held back
MOST_STOP_STRINGS = 64  # each is looked for behind every token


class StopStrings:
    """Passes text through until one of the stop strings is complete; that string and all after it is dropped.

    The stop string that is completed first ends the text; of several completed by the same character, the
    longest. Text that may be the beginning of a stop string is held back until it is decided, so what comes
    out never depends on where the pieces were cut.

    Args:
        stop_strings: texts that end the stream, or a single one; none passes everything through.

    Raises:
        UserError: a stop string is empty, no text, or longer than `LONGEST_STOP_STRING`; or there are more than
            `MOST_STOP_STRINGS`.
    """

    def __init__(self, stop_strings: str | Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings) if isinstance(stop_strings, (list, tuple)) else (stop_strings,)
        if len(self._stop_strings) > MOST_STOP_STRINGS:
            raise UserError(
                f"{len(self._stop_strings)} stop strings are given", f"give at most {MOST_STOP_STRINGS} of them"
            )
        for stop in self._stop_strings:
            _check(stop)
        self._held = ""
        self._found: str | None = None

    @property
    def any(self) -> bool:
        """Whether there is a stop string at all."""
        return bool(self._stop_strings)

    @property
    def found(self) -> str | None:
        """The stop string that ended the text, None while there was none."""
        return self._found

    def push(self, piece: str) -> str:
        """Return the text that is now known to stand before any stop string; "" once one was found."""
        if self._found is not None:
            return ""
        text = self._held + piece
        matches = [(text.find(stop), stop) for stop in self._stop_strings]
        ends = [(start + len(stop), start, stop) for start, stop in matches if start >= 0]
        if ends:
            _, start, self._found = min(ends)
            self._held = ""
            return text[:start]
        held = self._undecided_length(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return the text still held back: at the end of the stream no stop string can complete any more."""
        rest, self._held = self._held, ""
        return rest

    def _undecided_length(self, text: str) -> int:
        """Length of the longest ending of `text` that is the beginning of a longer stop string."""
        longest = max((len(stop) - 1 for stop in self._stop_strings), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            ending = text[-length:]
            if any(stop.startswith(ending) for stop in self._stop_strings):
                return length
        return 0


def _check(stop: object) -> None:
    if not isinstance(stop, str):
        raise UserError(f"stop string {shown(stop)} is not text", "give stop strings as text")
    if not stop:
        raise UserError("stop string '' is empty", "give a stop string of at least one character")
    if len(stop) > LONGEST_STOP_STRING:
        raise UserError(
            f"stop string {shown(stop)} has {len(stop)} characters",
            f"give a stop string of at most {LONGEST_STOP_STRING}",
        )
