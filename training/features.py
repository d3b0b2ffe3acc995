"""Feature shards: hidden states beside the tokens and distributions that heads learn from (layout: shards.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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


class Split(NamedTuple):
    """What heads are trained on, and the other conversations that they are scored on."""

    training: Features
    held_out: Features


def shard_paths(*folders: Path) -> list[Path]:
    """The shards of data folders in order.

    Raises:
        UserError: a folder has none.
    """
    paths = []
    for folder in folders:
        found = sorted(folder.glob("shard-*.npz"))
        if not found:
            raise UserError(f"{folder}: no feature shards here", "write them with medusa-distill")
        paths += found
    return paths


def load_features(paths: Sequence[Path], heads: int, *, train_on_inputs: bool = False) -> Split:
    """Read shards and keep the positions that have a label.

    Args:
        train_on_inputs: every token of training conversations is a label, also those that the assistant did not write.

    Raises:
        UserError: a shard is damaged, or nothing is left to train on or to score.
    """
    training, held_out = [], []
    for path in paths:
        shard = read_shard(path)
        held = np.repeat(shard["numbers"] % HELD_OUT_EVERY == 0, shard["lengths"])  # [T]
        training.append(_positions(shard, shard["owned"] | train_on_inputs, ~held, heads))
        held_out.append(_positions(shard, shard["owned"], held, heads))
    return Split(_joined(training, "training", paths), _joined(held_out, "held-out", paths))


def _joined(parts: Sequence[Features], kind: str, paths: Sequence[Path]) -> Features:
    if not any(map(len, parts)):
        raise UserError(f"{paths[0].parent}: no {kind} positions with labels", "write more data with medusa-distill")
    return Features(
        np.concatenate([part.hidden for part in parts]),
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.top_ids for part in parts]),
        np.concatenate([part.top_probabilities for part in parts]),
    )


def _positions(
    shard: dict[str, npt.NDArray[Any]], owned: npt.NDArray[np.bool_], wanted: npt.NDArray[np.bool_], heads: int
) -> Features:
    labels = head_labels(shard["tokens"], owned, shard["lengths"], heads)
    kept = np.flatnonzero((labels != IGNORED).any(axis=1) & wanted)
    # The distribution of token t+j+2 is what the target said behind token t+j+1.
    source = np.minimum(kept[:, None] + 1 + np.arange(heads), len(labels) - 1)  # [M, K]
    return Features(
        shard["hidden"][kept],
        labels[kept],
        shard["top_ids"][source],
        np.exp(shard["top_logprobs"][source].astype(np.float32)),
    )
