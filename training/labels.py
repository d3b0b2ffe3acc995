"""Which token each head is trained on, and what counts.

Head j (0-based) at position t learns token t+j+2: the LM head owns t+1. A label counts where its token is owned,
that is written by the assistant. Source: Medusa, arXiv 2401.10774, section 2.2.1, and design tables of the project.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IGNORED = -100
HEAD_WEIGHT_BASE = 0.8


def head_labels(
    tokens: npt.NDArray[np.integer],
    owned: npt.NDArray[np.bool_],
    lengths: npt.NDArray[np.integer],
    heads: int,
    *,
    first: int = 2,
) -> npt.NDArray[np.int64]:
    """Labels [T, heads] of packed conversations; IGNORED where there is none.

    Args:
        tokens, owned: [T], the conversations one behind the other.
        lengths: [C], tokens of each; a label never comes from the next conversation.
        heads: K.
        first: how far ahead the first column looks; with 1 it is the LM head's, and head j's is column j+1.
    """
    labels = np.full((len(tokens), heads), IGNORED, dtype=np.int64)
    ends = np.repeat(np.cumsum(lengths), lengths)  # [T]: end of each token's conversation
    position = np.arange(len(tokens))
    for head in range(heads):
        source = position + head + first
        inside = source < ends
        kept = inside.copy()
        kept[inside] = owned[source[inside]]
        labels[kept, head] = tokens[source[kept]]
    return labels


def head_weights(heads: int, base: float = HEAD_WEIGHT_BASE) -> npt.NDArray[np.float64]:
    """Weight of each head's loss, base^k with k counted from 1: [heads]."""
    return base ** np.arange(1, heads + 1)
