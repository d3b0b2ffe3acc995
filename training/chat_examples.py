"""Turn given conversations into tokens, and tell which of them the assistant writes when it is used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.text import Tokenizer
from medusa_engine.training.chat_data import ChatData, Message, Skip
from medusa_engine.training.example import Example


class ChatEncoder:
    """Tokens of a conversation with the checkpoint's own chat template.

    For every answer the prompt is what the engine would be given, the earlier messages and the header of the next
    one; what the whole conversation has behind that prompt, up to the stop token, is what the assistant wrote.

    Args:
        tokenizer: of the checkpoint.
        stop_ids: tokens that end an answer.

    Raises:
        UserError: there is no chat template, or it does not work.
    """

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._render([{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}])

    def encode(self, messages: Sequence[Message]) -> Example | Skip:
        """Tokens up to the last answer's stop token; owned: each answer with its stop token.

        Args:
            messages: as `chat_data.read_chat_data` gives them.

        Returns:
            The example, or why there is none: the template refuses the messages, an answer holds the text of a
            control token (which the assistant would not write), the tokens of a prompt are not the first ones of the
            conversation, or nothing stops an answer.
        """
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if any(self._has_control_token(messages[place]["content"]) for place in answers):
            return Skip.CONTROL_TOKEN
        try:
            rounds = [
                (self._tokenizer.encode_chat(messages[:place]), self._render(messages[: place + 1]))
                for place in answers
            ]
        except UserError:
            return Skip.REFUSED
        tokens = rounds[-1][1]  # the whole conversation
        owned = np.zeros(len(tokens), dtype=np.bool_)
        for prompt, turn in rounds:
            start = len(prompt)
            stop = next((place for place in range(start, len(turn)) if turn[place] in self._stop_ids), None)
            if turn[:start] != prompt:
                return Skip.REWRITTEN
            if stop is None:
                return Skip.NO_STOP
            if turn[: stop + 1] != tokens[: stop + 1]:
                return Skip.REWRITTEN
            owned[start : stop + 1] = True
        end = int(np.flatnonzero(owned)[-1]) + 1
        return Example(np.array(tokens[:end], dtype=np.int64), owned[:end])

    def _render(self, messages: Sequence[Message]) -> list[int]:
        text = self._tokenizer.render_chat(messages, add_generation_prompt=False)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _has_control_token(self, text: str) -> bool:
        if self._tokenizer.special_tokens_in(text):
            return True
        return not self._stop_ids.isdisjoint(self._tokenizer.encode(text, add_special_tokens=False))


def make_examples(
    data: ChatData,
    path: Path,
    *,
    tokenizer: Tokenizer | None,
    stop_ids: frozenset[int],
    vocab_size: int,
    max_length: int,
) -> list[Example]:
    """The examples of a data file, cut to `max_length` tokens; rows that give none are moved to `data.report.skipped`.

    Args:
        data: of `read_chat_data(path)`.
        tokenizer: needed where there are rows of messages.
        stop_ids: tokens that end an answer.
        vocab_size: of the model.
        max_length: tokens of an example at most.

    Raises:
        UserError: a token is outside the vocabulary, no row is left, or rows of messages have no chat template.
    """
    encoder = None
    examples: list[Example] = []
    for row in data.rows:
        if isinstance(row, Example):
            example: Example | Skip = row
        else:
            if tokenizer is None or not tokenizer.has_chat_template:
                raise UserError(
                    f"{path}: has rows of messages, but the model has no chat template",
                    "give a model with a chat template, or input_ids rows",
                )
            encoder = encoder or ChatEncoder(tokenizer, stop_ids)
            example = encoder.encode(row)
        if isinstance(example, Example):
            if (largest := int(example.tokens.max())) >= vocab_size:
                raise UserError(
                    f"{path}: a row has token {largest}, outside the model's vocabulary of {vocab_size}",
                    "give rows that were tokenised for this model, and a model whose tokenizer fits it",
                )
            example = Example(example.tokens[:max_length], example.owned[:max_length])
            if not example.owned.any():
                example = Skip.BEYOND_LENGTH
        if isinstance(example, Skip):
            data.report.used -= 1
            data.report.skipped[example] += 1
        else:
            examples.append(example)
    if not examples:
        raise UserError(
            f"{path}: no row can be used: {', '.join(data.report.lines()[1:])}", "give rows with a user and an answer"
        )
    return examples
