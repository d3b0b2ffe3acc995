"""transformers as a reference whose own rounding does not count."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def double_precision(model: Any) -> Iterator[Any]:
    """The model in double precision (but for what transformers always computes in fp32), and back after the block."""
    # The model's own `double` refuses what was read from GGUF, though its weights are plain tensors.
    torch.nn.Module.double(model)
    try:
        yield model
    finally:
        torch.nn.Module.float(model)
