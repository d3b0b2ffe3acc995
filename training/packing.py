"""Conversations one behind the other in rows of equal length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from medusa_engine.training.example import Example


class PackedRow(NamedTuple):
    """L tokens of one or more conversations, then padding.

    Attributes:
        input_ids: [L] int64.
        position_ids: [L] int64, from 0 in each conversation; 0 in the padding.
        segment_ids: [L] int64, number of the conversation in the row; -1 in the padding.
        owned: [L] bool, written by the assistant.
    """

    input_ids: npt.NDArray[np.int64]
    position_ids: npt.NDArray[np.int64]
    segment_ids: npt.NDArray[np.int64]
    owned: npt.NDArray[np.bool_]


def pack(examples: Iterable[Example], length: int, pad_id: int) -> Iterator[PackedRow]:
    """Rows of `length`, filled in order; a longer conversation is cut."""
    waiting: list[Example] = []
    for example in examples:
        cut = Example(example.tokens[:length], example.owned[:length])
        if waiting and sum(len(kept.tokens) for kept in waiting) + len(cut.tokens) > length:
            yield _row(waiting, length, pad_id)
            waiting = []
        waiting.append(cut)
    if waiting:
        yield _row(waiting, length, pad_id)


def _row(examples: list[Example], length: int, pad_id: int) -> PackedRow:
    row = PackedRow(
        np.full(length, pad_id, dtype=np.int64),
        np.zeros(length, dtype=np.int64),
        np.full(length, -1, dtype=np.int64),
        np.zeros(length, dtype=np.bool_),
    )
    start = 0
    for segment, example in enumerate(examples):
        place = slice(start, start + len(example.tokens))
        row.input_ids[place] = example.tokens
        row.position_ids[place] = np.arange(len(example.tokens))
        row.segment_ids[place] = segment
        row.owned[place] = example.owned
        start = place.stop
    return row
