"""Context lookup in numpy: what the exported round is compared with. The graph: exporter/lookup.py."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

LONGEST_KEY = 3  # tokens

Int64Array = npt.NDArray[np.int64]


def lookup_tokens(tokens: npt.ArrayLike, depth: int) -> Int64Array:
    """The tokens that followed where the end of the context occurred before.

    The key is the last three tokens; where they did not occur before, the last two, else the last one. Of several
    occurrences, which may overlap the key, the latest counts. Where the tokens behind it reach the end of the context,
    they go on from behind the occurrence, as a text that repeats itself does. Without any occurrence the last token
    is repeated, which is as good as any.

    Args:
        tokens: [n] the prompt and the answer with the next root, n >= 1.
        depth: tokens to give.

    Returns:
        [depth] int64.
    """
    context = np.asarray(tokens, dtype=np.int64)
    last = len(context) - 1
    for length in range(LONGEST_KEY, 0, -1):
        key = context[last + 1 - length :]
        for end in range(last - 1, length - 2, -1):
            if last + 1 >= length and np.array_equal(context[end + 1 - length : end + 1], key):
                return context[end + 1 + np.arange(depth) % (last - end)]
    return np.full(depth, context[-1])
