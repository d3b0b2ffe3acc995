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
        self._progress = [_Progress(stop) for stop in self._stop_strings]
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
        for end, character in enumerate(piece, start=len(self._held) + 1):
            complete = [progress.stop for progress in self._progress if progress.push(character)]
            if complete:
                self._found = max(complete, key=len)
                self._held = ""
                return text[: end - len(self._found)]
        released = len(text) - max((progress.matched for progress in self._progress), default=0)
        self._held = text[released:]
        return text[:released]

    def finish(self) -> str:
        """Return the text still held back: at the end of the stream no stop string can complete any more."""
        rest, self._held = self._held, ""
        return rest


class _Progress:
    """How much of one stop string a text ends with; each character takes constant time on average.

    Attributes:
        stop: the stop string.
        matched: length of the longest beginning of it that the text ends with.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        # Of each beginning: length of the longest shorter beginning that it ends with (Knuth, Morris, Pratt).
        self._borders = [0]
        border = 0
        for character in stop[1:]:
            border = self._longer(border, character)
            self._borders.append(border)

    def push(self, character: str) -> bool:
        """Read one more character; True if the stop string is complete, and nothing more is to be read."""
        self.matched = self._longer(self.matched, character)
        return self.matched == len(self.stop)

    def _longer(self, matched: int, character: str) -> int:
        while matched and self.stop[matched] != character:
            matched = self._borders[matched - 1]
        return matched + (self.stop[matched] == character)


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
