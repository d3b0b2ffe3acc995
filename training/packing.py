"""Several conversations in one row of fixed length, none of which sees or learns from another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError
from medusa_engine.training.example import Example
from medusa_engine.training.labels import head_labels

PADDING = -1  # segment id behind the last conversation


class PackedRow(NamedTuple):
    """L places: conversations one behind the other, then padding.

    Padding is told by `segment_ids`, never by the token's id: where the padding token is the stop token too, the
    stop tokens that the assistant wrote stay labels.

    Attributes:
        input_ids: [L] int64.
        position_ids: [L] int64, from 0 in every conversation, and in the padding.
        segment_ids: [L] int64, the conversation's place in the row; PADDING behind the last one.
        owned: [L] bool, False in the padding.
    """

    input_ids: npt.NDArray[np.int64]
    position_ids: npt.NDArray[np.int64]
    segment_ids: npt.NDArray[np.int64]
    owned: npt.NDArray[np.bool_]


def pack(examples: Iterable[Example], length: int, pad_id: int) -> Iterator[PackedRow]:
    """Fill rows in the order of the examples; a row ends where the next example does not fit.

    An example that is longer than a row is cut. One in which nothing is owned (any more) is left out, so every row
    has an owned token.

    Args:
        examples: conversations of any length.
        length: L.
        pad_id: token id of the padding; it may be a stop token's.

    Raises:
        UserError: `length` is less than 1.
    """
    if length < 1:
        raise UserError(f"a packed row of {counted(length, 'token')}", "give a length of at least 1")
    waiting: list[Example] = []
    used = 0
    for tokens, owned in examples:
        example = Example(tokens[:length], owned[:length])
        if not example.owned.any():
            continue
        if used + len(example.tokens) > length:
            yield _row(waiting, length, pad_id)
            waiting, used = [], 0
        waiting.append(example)
        used += len(example.tokens)
    if waiting:
        yield _row(waiting, length, pad_id)


def segment_lengths(row: PackedRow) -> npt.NDArray[np.int64]:
    """Tokens of each conversation of a row, in order, and last those of the padding if there is any: they sum to L."""
    starts = np.flatnonzero(row.position_ids == 0)
    return np.diff(starts, append=len(row.position_ids))


def causal_mask(segment_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """[L, L], True where the place of the row may see the place of the column: itself and earlier ones of its segment.

    Padding is a segment of its own, so every place sees at least itself and no softmax is empty.
    """
    place = np.arange(len(segment_ids))
    return (segment_ids[:, None] == segment_ids) & (place[:, None] >= place)


def packed_labels(row: PackedRow, heads: int, *, first: int = 2) -> npt.NDArray[np.int64]:
    """Labels [L, heads] as `labels.head_labels` gives them: never across a conversation's end, none in the padding."""
    return head_labels(row.input_ids, row.owned, segment_lengths(row), heads, first=first)


def _row(examples: list[Example], length: int, pad_id: int) -> PackedRow:
    lengths = [len(example.tokens) for example in examples]
    padding = length - sum(lengths)
    segments = [*range(len(examples)), PADDING]
    return PackedRow(
        input_ids=np.concatenate([*(example.tokens for example in examples), np.full(padding, pad_id)]),
        position_ids=np.concatenate([np.arange(count) for count in (*lengths, padding)]),
        segment_ids=np.repeat(segments, [*lengths, padding]),
        owned=np.concatenate([*(example.owned for example in examples), np.zeros(padding, dtype=np.bool_)]),
    )
