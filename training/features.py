"""Feature shards: hidden states beside the tokens and distributions that heads learn from (layout: shards.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from medusa_engine.runtime.errors import UserError
from medusa_engine.training.labels import IGNORED, head_labels
from medusa_engine.training.shards import read_shard

HELD_OUT_EVERY = 40  # conversation numbers divisible by this are never trained on


@dataclass(frozen=True)
class Features:
    """Positions with at least one label.

    Attributes:
        hidden: [M, H] float16.
        labels: [M, K] int64, IGNORED where head k has none.
        top_ids: [M, K, 8] int32, the target's likely tokens at the label's place.
        top_probabilities: [M, K, 8] float32, theirs; they sum to at most 1.
    """

    hidden: npt.NDArray[np.float16]
    labels: npt.NDArray[np.int64]
    top_ids: npt.NDArray[np.int32]
    top_probabilities: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.hidden)


def shard_paths(folder: Path) -> list[Path]:
    """The shards of a data folder in order.

    Raises:
        UserError: there are none.
    """
    paths = sorted(folder.glob("shard-*.npz"))
    if not paths:
        raise UserError(f"{folder}: no feature shards here", "write them with medusa-distill")
    return paths


def load_features(paths: Sequence[Path], heads: int, *, held_out: bool) -> Features:
    """Read shards and keep the positions of training (or held-out) conversations that have a label.

    Raises:
        UserError: a shard is damaged, or nothing is left.
    """
    parts = [part for path in paths for part in _shard_features(path, heads, held_out=held_out)]
    if not parts:
        kind = "held-out" if held_out else "training"
        raise UserError(f"{paths[0].parent}: no {kind} positions with labels", "write more data with medusa-distill")
    return Features(
        np.concatenate([part.hidden for part in parts]),
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.top_ids for part in parts]),
        np.concatenate([part.top_probabilities for part in parts]),
    )


def _shard_features(path: Path, heads: int, *, held_out: bool) -> Iterator[Features]:
    shard = read_shard(path)
    labels = head_labels(shard["tokens"], shard["owned"], shard["lengths"], heads)
    conversation = np.repeat(shard["numbers"], shard["lengths"])  # [T]
    kept = np.flatnonzero((labels != IGNORED).any(axis=1) & ((conversation % HELD_OUT_EVERY == 0) == held_out))
    if not len(kept):
        return
    # The distribution of token t+j+2 is what the target said behind token t+j+1.
    source = np.minimum(kept[:, None] + 1 + np.arange(heads), len(labels) - 1)  # [M, K]
    yield Features(
        shard["hidden"][kept],
        labels[kept],
        shard["top_ids"][source],
        np.exp(shard["top_logprobs"][source].astype(np.float32)),
    )
