"""The text of an answer while its tokens arrive: decoded, and ended by the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from medusa_engine.runtime.stop_strings import StopStrings
from medusa_engine.runtime.stream_decoder import StreamDecoder


class AnswerText:
    """Decodes published tokens until a stop string is complete.

    Args:
        decoder: of the tokens behind the prompt.
        stops: that end the text.
    """

    def __init__(self, decoder: StreamDecoder, stops: StopStrings) -> None:
        self._decoder = decoder
        self._stops = stops

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stops.found is not None

    def push(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """The text that became final, and how many of the tokens belong to the answer: those up to the stop string."""
        if not self._stops.any:
            return self._decoder.push(token_ids), len(token_ids)
        text = ""
        for count, token_id in enumerate(token_ids, start=1):
            text += self._stops.push(self._decoder.push([token_id]))
            if self.stopped:
                return text, count
        return text, len(token_ids)

    def finish(self) -> str:
        """The rest of the text; a stop string may end it, too."""
        return self._stops.push(self._decoder.finish()) + self._stops.finish()
