"""Context lookup in numpy: what the exported round is compared with. The graph: exporter/lookup.py."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

LONGEST_KEY = 3  # tokens

Int64Array = npt.NDArray[np.int64]


def latest_match(tokens: npt.ArrayLike) -> tuple[int, int]:
    """Where the end of the context occurred before.

    The key is the last three tokens; where they did not occur before, the last two, else the last one. Of several
    occurrences, which may overlap the key, the latest counts.

    Args:
        tokens: [n] as of `lookup_tokens`.

    Returns:
        The key's length, and the index of the last token of the occurrence. Without any: 0, and the last token but one.
    """
    context = np.asarray(tokens, dtype=np.int64)
    last = len(context) - 1
    ends = np.flatnonzero(context[:last] == context[last])  # of occurrences of the last token
    length = 0
    while len(ends) and length < LONGEST_KEY:
        length, found = length + 1, ends
        ends = ends[ends >= length]  # there is a token before it
        ends = ends[context[ends - length] == context[last - length]]
    return (length, int(found[-1])) if length else (0, last - 1)


def lookup_tokens(tokens: npt.ArrayLike, depth: int) -> Int64Array:
    """The tokens that followed where the end of the context occurred before.

    See `latest_match` for the place. Where the tokens behind it reach the end of the context, they go on from behind
    the occurrence, as a text that repeats itself does. Without any occurrence the last token is repeated, which is as
    good as any.

    Args:
        tokens: [n] the prompt and the answer with the next root, n >= 1.
        depth: tokens to give.

    Returns:
        [depth] int64.
    """
    context = np.asarray(tokens, dtype=np.int64)
    _, end = latest_match(context)
    return context[end + 1 + np.arange(depth) % (len(context) - 1 - end)]
