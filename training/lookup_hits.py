"""What context lookup gets right on recorded answers, replayed with the numpy reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from medusa_engine.runtime.lookup import LONGEST_KEY, latest_match, lookup_tokens
from medusa_engine.runtime.tree import MOST_LOOKUP

_SHOWN_DEPTH = 4


class Lookups(NamedTuple):
    """Behind each of the first T tokens of an answer.

    Attributes:
        keys: [T] int64, length of the key that occurred before; 0 where none did.
        runs: [T] int64, tokens looked up that are right, up to the first that is not; MOST_LOOKUP at most.
        ahead: [T] int64, tokens that are recorded behind it; MOST_LOOKUP at most.
    """

    keys: npt.NDArray[np.int64]
    runs: npt.NDArray[np.int64]
    ahead: npt.NDArray[np.int64]


class LookupCounts(NamedTuple):
    """How often lookup is right, given the key's length and that it was right before.

    Attributes:
        positions: [D][LONGEST_KEY + 1], entry d, k: positions with a key of k tokens at which the first d tokens looked
            up are right and one more is recorded behind them.
        hits: [D][LONGEST_KEY + 1], those at which the next one is right, too.
    """

    positions: list[list[int]]
    hits: list[list[int]]


def look_ups(prompt_ids: Sequence[int], token_ids: Sequence[int], count: int) -> Lookups:
    """Look up behind each of the first `count` tokens of an answer, as the round does whose root it is.

    Args:
        token_ids: of the answer, `count` at least.
    """
    context = np.array([*prompt_ids, *token_ids], dtype=np.int64)
    found = np.zeros((3, count), dtype=np.int64)
    for token in range(count):
        end = len(prompt_ids) + token + 1
        following = context[end : end + MOST_LOOKUP]
        wrong = np.flatnonzero(lookup_tokens(context[:end], len(following)) != following)
        key, _ = latest_match(context[:end])
        found[:, token] = key, wrong[0] if len(wrong) else len(following), len(following)
    return Lookups(*found)


def lookup_counts(answers: Sequence[Lookups]) -> LookupCounts:
    """Depth by depth, up to the last at which anything was right."""
    keys, runs, ahead = (np.concatenate(each) for each in zip(*answers, strict=True))
    counts = LookupCounts([], [])
    for depth in range(int(runs.max(initial=0))):
        reached = (runs >= depth) & (ahead > depth)
        for table, some in ((counts.positions, reached), (counts.hits, runs > depth)):
            table.append(np.bincount(keys[some], minlength=LONGEST_KEY + 1).tolist())
    return counts


def lookup_lines(counts: LookupCounts) -> list[str]:
    """For people: of each key length how often it is found, and is right at the first depths."""
    if not counts.positions:
        return ["lookup: never right"]
    total = sum(counts.positions[0])
    lines = []
    for length in range(LONGEST_KEY, 0, -1):
        rates = [
            f"{hits[length] / positions[length]:.0%}"
            for positions, hits in zip(counts.positions, counts.hits, strict=True)
            if positions[length]
        ][:_SHOWN_DEPTH]
        share = counts.positions[0][length] / total
        lines.append(f"lookup, key of {length}: found at {share:.0%} of the tokens" + (", right: " if rates else ""))
        lines[-1] += ", ".join(rates)
    return lines
