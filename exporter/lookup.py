"""Context lookup in torch: tokens that followed where the end of the context occurred before.

A handful of passes over the tokens, in operators that depend on no data. The numpy reference: runtime/lookup.py.
"""

from __future__ import annotations

import torch

from medusa_engine.runtime.lookup import LONGEST_KEY
from medusa_engine.runtime.manifest import LARGEST_LIMIT

NOTHING = -2  # stands before the first token and equals none


def context_of(
    history: torch.Tensor, root_position: torch.Tensor, published: torch.Tensor, count: torch.Tensor, root: torch.Tensor
) -> torch.Tensor:
    """The history with what a pass adds: its published tokens, and the root of the next tree behind them.

    Args:
        history: [S] tokens by position, right before `root_position`; has room for D+2 more behind it.
        root_position: [1] of the pass.
        published: [D+1] anything behind the [1] `count`.
        root: [1].

    Returns:
        [S] right up to position `root_position + count`.
    """
    places = root_position + torch.arange(published.shape[0])
    return history.scatter(0, places, published).scatter(0, root_position + count, root)


def look_up(context: torch.Tensor, last: torch.Tensor, depth: int) -> torch.Tensor:
    """As `runtime.lookup.lookup_tokens`, [depth].

    Args:
        context: [S] tokens by position, anything behind `last`.
        last: [1] position of the last token.
    """
    size = context.shape[0]
    positions = torch.arange(size)
    # How many tokens up to each position are those up to the last one, LONGEST_KEY at most.
    most = LONGEST_KEY - 1
    padded = torch.cat([torch.full((most,), NOTHING, dtype=torch.int64), context])
    run = padded[most:] == padded.index_select(0, last + most)  # [S]
    matched = run.to(torch.int64)
    for length in range(1, LONGEST_KEY):
        before = most - length
        run = run & (padded[before : before + size] == padded.index_select(0, last + before))
        matched = matched + run.to(torch.int64)
    # The longest match, the latest of equals: one number says both.
    score = torch.where((matched > 0) & (positions < last), matched * LARGEST_LIMIT + positions, -1)
    best = score.amax(dim=0, keepdim=True)  # [1]
    end = torch.where(best >= 0, best % LARGEST_LIMIT, last - 1)  # without a match the last token repeats itself
    steps = torch.arange(depth) % (last - end)  # last - end >= 1
    return context.index_select(0, end + 1 + steps)
