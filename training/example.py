"""One conversation to learn from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Example(NamedTuple):
    """A conversation as tokens.

    Attributes:
        tokens: [T] int64.
        owned: [T] bool, written by the assistant.
    """

    tokens: npt.NDArray[np.int64]
    owned: npt.NDArray[np.bool_]
