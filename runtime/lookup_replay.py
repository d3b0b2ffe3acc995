"""What lookups find while an answer is written, whatever trees its rounds verify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from medusa_engine.runtime.lookup import LONGEST_KEY


class Match(NamedTuple):
    """What is known of a lookup before it is verified.

    Attributes:
        key: tokens at the end of the context that occurred before, up to LONGEST_KEY; 0 where not even the last did.
        streak: how many tokens up to the last one the lookups of one token before them found, in a row.
    """

    key: int
    streak: int


class LookupReplay:
    """What lookups behind the tokens of an answer find, and how far that is right, known without any round.

    It says what `lookup_tokens` says of the same context. Its time per token does not grow with the context.

    Args:
        prompt: token ids, at least one.
        depth: tokens of a lookup that are looked at.

    Attributes:
        tokens: prompt and answer.
        match: of the lookup behind them.
    """

    def __init__(self, prompt: Sequence[int], depth: int) -> None:
        self.tokens: list[int] = []
        self.match = Match(0, 0)
        self._depth = depth
        self._ends: dict[tuple[int, ...], int] = {}  # key -> where it ended last
        self._found: list[int] = []  # by position: where the occurrence ends that its lookup goes on from
        for token in prompt:
            self.append(token)
        self.match = self.match._replace(streak=0)  # a prompt is another kind of text

    def append(self, token: int) -> None:
        """Take the next token of the answer."""
        position = len(self.tokens)
        end, self.match = self._look_up(token)
        self.tokens.append(token)
        for length in range(1, min(LONGEST_KEY, position + 1) + 1):
            self._ends[tuple(self.tokens[position + 1 - length :])] = position
        self._found.append(end)

    def match_behind(self, token: int) -> Match:
        """The match of the lookup behind a token that is known to come next."""
        return self._look_up(token)[1]

    def _look_up(self, token: int) -> tuple[int, Match]:
        """Where the occurrence ends that the lookup behind a next token goes on from, and the match."""
        position = len(self.tokens)
        right = bool(position) and self.tokens[self._found[-1] + 1] == token
        streak = self.match.streak + 1 if right else 0
        for length in range(min(LONGEST_KEY, position + 1), 0, -1):
            end = self._ends.get((*self.tokens[position + 1 - length :], token))
            if end is not None:
                return end, Match(length, streak)
        return position - 1, Match(0, streak)  # without any occurrence the last token is repeated

    def hits(self, position: int) -> int | None:
        """How many tokens of the lookup behind a position are right; None if it takes more tokens to tell."""
        end = self._found[position]
        for step in range(self._depth):
            at = position + 1 + step
            if at == len(self.tokens):
                return None
            # Behind the end of the context it goes on with what it copied, which has been found right.
            if self.tokens[at] != self.tokens[end + 1 + step]:
                return step
        return self._depth
