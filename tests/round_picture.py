"""Rounds drawn as text for docs/architecture.md, by the code that rounds run by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from medusa_engine.plugins.compact_append_kv.reference import compact_append_kv
from medusa_engine.runtime.accept import Acceptance, accept_greedy
from medusa_engine.runtime.tree import parse_tree
from medusa_engine.runtime.tree_buffers import compile_tree

HEADS, TOPK = 2, 2
TREE = parse_tree([[0], [1], [0, 0]], "example")
BUFFERS = compile_tree(TREE, topk=TOPK, depth=HEADS)
WORDS = "·abcdefghijklmnopqrstuvwxyz"
PROMPT, CACHE_ROWS = 5, 13
LISTED = ("gjha", "kjla")  # by the heads before each round

_LABEL, _CELL = 13, 7

Ints = npt.NDArray[np.int64]


def picture() -> str:
    """Two rounds of a model that recites the alphabet, from packed tree to cache to the next tree."""
    cache = np.zeros((1, 1, CACHE_ROWS, 1), dtype=np.int64)
    cache[0, 0, :PROMPT, 0] = range(1, PROMPT + 1)
    past_length, pending, root = PROMPT - 1, np.zeros(1, dtype=np.int64), PROMPT + 1  # as a prompt chunk leaves them
    lines = [_line("cache row", range(CACHE_ROWS)), _line("prompt", _cached(cache))]
    for number, listed in enumerate(LISTED, 1):
        candidates = np.array([root, *map(WORDS.index, listed)])  # [1 + K * TOPK]
        tokens = candidates[BUFFERS.tree_indices]  # [N]
        lines += ["", f"ROUND {number}   past_length {past_length}, pending rows {_several(pending)}", ""]
        lines += [_line("slot", range(len(candidates))), _line("candidate", (WORDS[token] for token in candidates)), ""]
        lines += _packed(tokens, past_length + len(pending))
        cache = compact_append_kv(cache, tokens[None, None, :, None], past_length, pending, len(pending))
        past_length += len(pending)
        accepted = accept_greedy(tokens, tokens + 1, BUFFERS.retrieve_indices)
        lines += [*_outcome(tokens, accepted), "", _line("cache row", range(CACHE_ROWS)), _line("now", _cached(cache))]
        pending, root = accepted.path_rows[: accepted.published_count], accepted.next_root
    return "\n".join(lines)


def _packed(tokens: Ints, staged: int) -> Iterator[str]:
    rows = range(TREE.nodes)
    yield _line("packed row", rows)
    yield _line("path", ("root", *(str(list(path)).replace(" ", "") for path in TREE.paths)))
    yield _line("slot", BUFFERS.tree_indices)
    yield _line("token", (WORDS[token] for token in tokens))
    yield _line("position", staged + BUFFERS.position_offsets)
    yield _line("cache row", (staged + row for row in rows))
    yield _line("sees rows", (_several(np.flatnonzero(mask)) for mask in BUFFERS.tree_mask))
    yield _line("model says", (WORDS[token + 1] for token in tokens))


def _outcome(tokens: Ints, accepted: Acceptance) -> Iterator[str]:
    rows = accepted.path_rows[: accepted.published_count]
    yield _line("accepted", ("yes" if row in rows else "" for row in range(TREE.nodes)))
    yield ""
    words = " ".join(WORDS[token] for token in accepted.published_tokens)
    root = WORDS[accepted.next_root]
    yield f"G = {accepted.published_count}: publishes {words}; row {accepted.winning_row} wins, {root} is the next root"


def _cached(cache: Ints) -> Iterator[str]:
    return (WORDS[token] for token in cache[0, 0, :, 0])


def _several(numbers: Iterable[int]) -> str:
    return ",".join(str(number) for number in numbers) or "none"


def _line(label: str, cells: Iterable[object]) -> str:
    return f"{label:{_LABEL}}{''.join(f'{cell!s:{_CELL}}' for cell in cells)}".rstrip()
