"""What Medusa-2 learns from: packed rows with the labels of the LM head and of every Medusa head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from medusa_engine.runtime.errors import UserError
from medusa_engine.training.example import Example
from medusa_engine.training.features import HELD_OUT_EVERY
from medusa_engine.training.labels import IGNORED
from medusa_engine.training.packing import PackedRow, pack, packed_labels
from medusa_engine.training.shards import read_shard


def shard_examples(paths: Sequence[Path]) -> Iterator[Example]:
    """The training conversations in shards of medusa-distill.

    Raises:
        UserError: one is damaged.
    """
    for path in paths:
        shard = read_shard(path)
        ends = np.cumsum(shard["lengths"])
        for number, start, end in zip(shard["numbers"], ends - shard["lengths"], ends, strict=True):
            if number % HELD_OUT_EVERY:
                yield Example(shard["tokens"][start:end].astype(np.int64), shard["owned"][start:end])


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
    """Labels [L, 1 + heads]: column i at position t is token t+i+1. Column 0 is the LM head's, column j+1 head j's."""
    return packed_labels(row, 1 + heads, first=1)


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
