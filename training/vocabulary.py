"""The tokens that heads choose from: all of the model's, or a draft vocabulary of the most frequent ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from medusa_engine.training.features import Features
from medusa_engine.training.labels import IGNORED


class Vocabulary:
    """Rows of the LM projection that the heads use.

    Args:
        projection: [V, H], the frozen LM projection.
        token_map: [V'] int64 ascending ids of the draft vocabulary, or None for all tokens.

    Attributes:
        weight: [V', H], the rows of `projection` that are used.
    """

    def __init__(self, projection: torch.Tensor, token_map: npt.NDArray[np.int64] | None) -> None:
        self.token_map = token_map
        self.weight = projection if token_map is None else projection[torch.from_numpy(token_map)]
        self._place = np.arange(len(projection))
        if token_map is not None:
            self._place = np.full(len(projection), IGNORED)
            self._place[token_map] = np.arange(len(token_map))

    def places(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Rows of `weight` for token ids; IGNORED where a token is outside or is IGNORED itself."""
        return np.where(ids == IGNORED, IGNORED, self._place[np.maximum(ids, 0)])


def draft_vocabulary(features: Features, size: int) -> npt.NDArray[np.int64]:
    """The `size` most frequent labels of head 0, ascending: [V']."""
    labels = features.labels[:, 0]
    ids, counts = np.unique(labels[labels != IGNORED], return_counts=True)
    return np.sort(ids[np.argsort(-counts, kind="stable")[:size]])
