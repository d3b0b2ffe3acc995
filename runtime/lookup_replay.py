"""What lookups find while an answer is written, whatever trees its rounds verify."""

from __future__ import annotations

from collections.abc import Sequence

from medusa_engine.runtime.lookup import LONGEST_KEY


class LookupReplay:
    """What lookups behind the tokens of an answer find, and how far that is right, known without any round.

    It says what `lookup_tokens` says of the same context. Its time per token does not grow with the context.

    Args:
        prompt: token ids, at least one.
        depth: tokens of a lookup that are looked at.

    Attributes:
        tokens: prompt and answer.
        streak: how many tokens up to the last one the lookups of one token before them found, in a row.
    """

    def __init__(self, prompt: Sequence[int], depth: int) -> None:
        self.tokens: list[int] = []
        self.streak = 0
        self._depth = depth
        self._ends: dict[tuple[int, ...], int] = {}  # key -> where it ended last
        self._found: list[int] = []  # by position: where the occurrence ends that its lookup goes on from
        for token in prompt:
            self.append(token)
        self.streak = 0  # a prompt is another kind of text

    def append(self, token: int) -> None:
        """Take the next token of the answer."""
        position = len(self.tokens)
        if position:
            found = self._found[-1]
            self.streak = self.streak + 1 if self.tokens[found + 1] == token else 0
        self.tokens.append(token)
        end = position - 1  # without any occurrence the last token is repeated
        for length in range(min(LONGEST_KEY, position + 1), 0, -1):
            key = tuple(self.tokens[position + 1 - length :])
            before = self._ends.get(key)
            self._ends[key] = position
            if before is not None and end == position - 1:
                end = before
        self._found.append(end)

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
