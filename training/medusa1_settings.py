"""What Medusa-1 training is asked to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainSettings:
    """How the heads are trained.

    Attributes:
        heads, layers: K heads of that many residual blocks.
        biases: the residual blocks have biases.
        own_projection: every head trains a copy of the LM projection of its own; else they share the frozen one.
        epochs: passes over the data at most; training stops early when the held-out loss stops falling.
        batch: positions per optimiser step.
        accumulate: forward passes a batch is split into; the result is that of the whole batch.
        learning_rate, weight_decay: of AdamW; the rate warms up and falls on a cosine.
        soft: share of the loss that compares with the target's distribution instead of the written token.
        seed: of the order of positions.
        dtype: of the matrix products, one of `device.DTYPES`; weights and losses are float32 throughout.
        device: where training runs.
    """

    heads: int = 4
    layers: int = 1
    biases: bool = True
    own_projection: bool = False
    epochs: int = 4
    batch: int = 2048
    accumulate: int = 1
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    soft: float = 1.0
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
