"""One training example: tokens, and which of them the assistant wrote."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Example(NamedTuple):
    """A tokenised conversation.

    Attributes:
        tokens: [T] int64.
        owned: [T] bool, True where the token was written by the assistant: its content, and the stop token that
            ends its turn. Only owned tokens are labels.
    """

    tokens: npt.NDArray[np.int64]
    owned: npt.NDArray[np.bool_]
