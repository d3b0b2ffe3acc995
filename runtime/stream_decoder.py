"""Turn a growing list of token ids into text, a piece at a time, without decoding the whole list again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers

from medusa_engine.runtime.tokenizer_errors import refusing

# Tokens kept to decode the next ones. At least 3: a UTF-8 decoder's state depends on the last 3 bytes, and a
# token has one byte or more.
CONTEXT_TOKENS: Final = 8
_REPLACEMENT_CHARACTER: Final = "\ufffd"


class StreamDecoder:
    """Decodes ids as they arrive: the joined pieces equal the decoded text of all ids pushed.

    After a prompt the pieces are what the new ids add to the prompt's text, a leading space included.

    A piece is released once no later id can change it. Held back are an incomplete UTF-8 character at the
    end, and a run of byte tokens (`<0x0A>`) until another token ends it, because one invalid byte turns
    the whole run into U+FFFD. A tokenizer whose decoder rewrites text across tokens (`CTC`, `Replace` or
    `WordPiece` behind `Fuse`, `Strip` at the end, an unknown kind) gives all its text in `finish`.

    Only the last few tokens are decoded again at each push. They are kept as context because the first
    token of a list may lose its leading space, and because a character may span tokens.

    Args:
        tokenizer: the tokenizer of the ids. Ids that it does not know have no text.
        file: it was read from; errors name it.
        skip_special_tokens: leave special tokens out of the text.
        prompt_ids: ids that stand before the first pushed one; their text is not released.

    Raises:
        UserError: here, in `push` and in `finish`: the library fails on what the file says.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        file: Path | str = "tokenizer.json",
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._file = file
        self._skipped: frozenset[str] = frozenset()
        if skip_special_tokens:
            added = tokenizer.get_added_tokens_decoder().values()
            self._skipped = frozenset(token.content for token in added if token.special)
        steps = list(_decoder_steps(tokenizer.decoder))
        self._streams = _decodes_locally(steps)
        self._byte_fallback = any(step["type"] == "ByteFallback" for step in steps)
        self._finished = False
        self._window: list[int] = []  # ids with text, the context first
        self._open = 0  # ids at the window's end whose text later ids can still change as a whole
        self._extend(prompt_ids)
        self._sent = self._decode(self._window)  # the part of the window's text that is not to be released again

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that became final with these ids, "" when there is none.

        Raises:
            UserError: as above.
            RuntimeError: the stream was finished.
        """
        if self._finished:
            raise RuntimeError("push after finish: start a new stream decoder")
        added = self._extend(ids)
        if added <= self._open:
            return ""
        closed = len(self._window) - self._open
        text = self._decode(self._window[:closed])
        piece = self._release(text.removesuffix(_REPLACEMENT_CHARACTER))
        if closed >= 2 * CONTEXT_TOKENS:
            self._drop_context(text, closed)
        return piece

    def finish(self) -> str:
        """Return the rest of the text; an incomplete character at the end becomes U+FFFD."""
        self._finished = True
        return self._release(self._decode(self._window))

    def _decode(self, ids: Sequence[int]) -> str:
        with refusing(f"{self._file}: the tokenizer fails"):
            return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""

    def _extend(self, ids: Sequence[int]) -> int:
        """Append the ids that have text and return how many those are."""
        added = 0
        for token_id in ids:
            token = self._tokenizer.id_to_token(token_id)
            if token is None or token in self._skipped:
                continue
            self._window.append(token_id)
            added += 1
            held = not self._streams or (self._byte_fallback and _is_byte_token(token))
            self._open = self._open + 1 if held else 0
        return added

    def _release(self, text: str) -> str:
        """Return what `text`, final for the window, adds to the text that was sent.

        The sent text is a prefix of `text` except behind a prompt that ends inside a character or a byte
        run: its decoded form then shares only a beginning with the final text.
        """
        piece = text[_shared_length(text, self._sent) :]
        if piece:
            self._sent = text
        return piece

    def _drop_context(self, text: str, closed: int) -> None:
        """Shorten the window to its last tokens.

        Their own text may begin differently (half a character, no leading space) but goes on as the whole does.

        Args:
            text: the decoded first `closed` ids of the window.
            closed: number of ids whose text is final but for an incomplete character.
        """
        start = closed - CONTEXT_TOKENS
        tail = self._decode(self._window[start:closed])
        if tail:  # or the decoder would still strip spaces that stand in the middle of the whole text
            unsent = len(text) - len(self._sent)
            self._sent = tail[: len(tail) - unsent]
            del self._window[:start]


def _shared_length(text: str, other: str) -> int:
    """Number of characters with which both begin."""
    if text.startswith(other):
        return len(other)
    return next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), len(text))


def _is_byte_token(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _decoder_steps(decoder: Any) -> Iterator[dict[str, Any]]:
    """The decoder's steps in order, nested sequences flattened; none without a decoder."""
    pending = [] if decoder is None else [json.loads(decoder.__getstate__())]
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending = step["decoders"] + pending
        else:
            yield step


def _decodes_locally(steps: Sequence[dict[str, Any]]) -> bool:
    """Whether a token's text depends on its neighbours only through spaces, characters and byte runs."""
    fused = False  # the steps below see one text instead of single tokens
    for step in steps:
        kind = step["type"]
        if kind in ("ByteLevel", "Fuse"):
            fused = True
        elif kind in ("BPEDecoder", "Replace", "WordPiece"):
            if fused:
                return False
        elif kind == "Strip":
            if step["stop"]:  # tokenizers 0.23 panics where fewer characters are left than it may strip
                return False
        elif kind not in ("ByteFallback", "Metaspace"):
            return False
    return True
