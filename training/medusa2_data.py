"""What Medusa-2 learns from: packed rows with the labels of the LM head and of every Medusa head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from medusa_engine.runtime.errors import UserError
from medusa_engine.training.example import Example
from medusa_engine.training.features import HELD_OUT_EVERY, shard_paths
from medusa_engine.training.labels import IGNORED
from medusa_engine.training.packing import PackedRow, pack


def shard_examples(folder: Path) -> Iterator[Example]:
    """The training conversations in a data folder of medusa-distill.

    Raises:
        UserError: there are no shards, or one is damaged.
    """
    for path in shard_paths(folder):
        try:
            with np.load(path) as shard:
                numbers, lengths, tokens, owned = (shard[name] for name in ("numbers", "lengths", "tokens", "owned"))
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{path}: damaged: {error}", "remove the file; medusa-distill writes it again") from error
        ends = np.cumsum(lengths)
        for number, start, end in zip(numbers, ends - lengths, ends, strict=True):
            if number % HELD_OUT_EVERY:
                yield Example(tokens[start:end].astype(np.int64), owned[start:end])


def packed_rows(examples: Iterator[Example], length: int, pad_id: int, *, name: str) -> list[PackedRow]:
    """Rows of `length` tokens that have something to learn.

    Raises:
        UserError: none has.
    """
    rows = [row for row in pack(examples, length, pad_id) if (row_labels(row, 0) != IGNORED).any()]
    if not rows:
        raise UserError(f"{name}: no conversation with a token of the assistant to learn", "give more data")
    return rows


def row_labels(row: PackedRow, heads: int) -> npt.NDArray[np.int64]:
    """Labels [L, 1 + heads]: column i at position t is token t+i+1, so column 0 is the LM head's, column j+1 head j's.

    IGNORED where that token is not the assistant's, or belongs to another conversation or to none.
    """
    length = len(row.input_ids)
    labels = np.full((length, 1 + heads), IGNORED, dtype=np.int64)
    for column in range(min(1 + heads, length - 1)):
        offset = column + 1
        same = (row.segment_ids[offset:] == row.segment_ids[:-offset]) & (row.segment_ids[offset:] >= 0)
        kept = np.flatnonzero(same & row.owned[offset:])
        labels[kept, column] = row.input_ids[kept + offset]
    return labels


class RowCollator:
    """Makes tensors of packed rows: `input_ids`, `position_ids` [B, L] and `labels` [B, L, 1 + heads], all int64."""

    def __init__(self, heads: int) -> None:
        self._heads = heads

    def __call__(self, rows: Sequence[PackedRow]) -> dict[str, torch.Tensor]:
        return {
            "input_ids": torch.from_numpy(np.stack([row.input_ids for row in rows])),
            "position_ids": torch.from_numpy(np.stack([row.position_ids for row in rows])),
            "labels": torch.from_numpy(np.stack([row_labels(row, self._heads) for row in rows])),
        }
