"""Run a quantised round over a tree and over each of its paths alone: the logits must be the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from medusa_engine.exporter.check import GraphSession
from medusa_engine.exporter.round_shape import RoundShape
from medusa_engine.runtime.errors import UserError

_CHUNK_TOKENS = 21
_BRANCH_TOKENS = 3
_BRANCHES = 4


def check_rows(graph: Path, shape: RoundShape) -> None:
    """Compare the logits of tree rows with those of plain decoding, one row per pass.

    Speculation with quantised rows is exact only where a row gives the same bits whatever is computed beside it and
    wherever its keys lie. That holds by construction of the graph, and for the kernels that were looked at; whether it
    holds for those of this processor is seen here.

    Args:
        graph: a round graph that outputs its logits too.

    Raises:
        UserError: they differ.
    """
    room = shape.cache_rows - shape.depth - 1
    chunk = min(_CHUNK_TOKENS, max(1, room // 2))
    length = min(_BRANCH_TOKENS, max(0, (room - chunk - 1) // _BRANCHES))
    random = np.random.default_rng(0)
    prompt = random.integers(0, shape.vocab_size, size=chunk)
    root = random.integers(0, shape.vocab_size, size=1)
    branches = random.integers(0, shape.vocab_size, size=(_BRANCHES, length))

    # Packed as trees are, by depth: the rows of one branch lie apart.
    depths = np.repeat(np.arange(length + 1), [1, *[_BRANCHES] * length])
    rows = 1 + np.arange(_BRANCHES)[:, None] + _BRANCHES * np.arange(length)  # [branch, depth]
    mask = np.eye(len(depths), dtype=np.bool_)
    mask[:, 0] = True
    for branch in rows:
        mask[np.ix_(branch, branch)] |= np.tri(length, dtype=np.bool_)
    tree = GraphSession(graph, shape, np.float32)
    tree.run(prompt, np.arange(chunk), np.tri(chunk, dtype=np.bool_))
    logits = tree.run(np.concatenate([root, branches.T.reshape(-1)]), chunk + depths, mask)
    for branch, own in zip(branches, rows, strict=True):
        plain = GraphSession(graph, shape, np.float32)
        plain.run(prompt, np.arange(chunk), np.tri(chunk, dtype=np.bool_))
        for depth, (token, row) in enumerate(zip([*root, *branch], [0, *own], strict=True)):
            alone = plain.run(np.array([token]), np.array([chunk + depth]), np.ones((1, 1), dtype=np.bool_))
            if not np.array_equal(alone[0], logits[row]):
                raise UserError(
                    f"on this processor a row of a tree differs from plain decoding by "
                    f"{np.abs(alone[0] - logits[row]).max():.1e}, at depth {depth}: speculation would not be exact",
                    "export with --precision fp32, and please report the processor and the ONNX Runtime version",
                )
