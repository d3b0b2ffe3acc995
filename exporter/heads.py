"""Medusa heads: their weights, checked against the backbone, and the module that is traced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from medusa_engine.runtime.counted import counted

Blocks = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class HeadWeights:
    """Weights of K heads of `layers` residual blocks each.

    Attributes:
        residual_weight: [K, layers, H, H].
        residual_bias: [K, layers, H].
        projection: [K, V', H], or [1, V', H] for one that all heads use, or None for the backbone's LM projection.
        token_map: [V'] int64, the draft vocabulary: token of each projection row; None where V' is the vocabulary.
        adapter: sha256 of the file of the LoRA adapter that they were trained with; None for the base model itself.
        trained: False for zero-initialised heads.
        source: what the weights were read from, for the manifest.
        files: the files they were read from.
        notes: what is odd about those and does not matter, for the user.
    """

    residual_weight: torch.Tensor
    residual_bias: torch.Tensor
    projection: torch.Tensor | None
    trained: bool
    source: str
    files: tuple[Path, ...] = ()
    token_map: torch.Tensor | None = None
    notes: tuple[str, ...] = ()
    adapter: str | None = None

    def with_token_map(self, token_map: torch.Tensor) -> HeadWeights:
        """The same heads over a draft vocabulary."""
        return replace(self, token_map=token_map)

    def with_projection(self, projection: torch.Tensor) -> HeadWeights:
        """The same heads with projections of their own, [K, V', H]."""
        return replace(self, projection=projection)

    def half(self) -> HeadWeights:
        """The same heads in fp16."""
        return self.to(torch.float16)

    def to(self, dtype: torch.dtype) -> HeadWeights:
        """The same heads in another dtype."""
        return replace(
            self,
            residual_weight=self.residual_weight.to(dtype),
            residual_bias=self.residual_bias.to(dtype),
            projection=None if self.projection is None else self.projection.to(dtype),
        )

    @property
    def heads(self) -> int:
        return self.residual_weight.shape[0]

    @property
    def layers(self) -> int:
        return self.residual_weight.shape[1]

    @property
    def hidden(self) -> int:
        return self.residual_weight.shape[2]

    @property
    def projections(self) -> int:
        """Projections that a bundle stores for the heads: a draft vocabulary has rows of its own, copied if need be."""
        if self.projection is not None:
            return self.projection.shape[0]
        return 0 if self.token_map is None else 1


def untrained_heads(heads: int, hidden: int, *, layers: int = 1) -> HeadWeights:
    """Zero-initialised residual blocks with the shared LM projection: each head repeats the LM head's own guess."""
    return HeadWeights(
        residual_weight=torch.zeros(heads, layers, hidden, hidden),
        residual_bias=torch.zeros(heads, layers, hidden),
        projection=None,
        trained=False,
        source=f"untrained ({counted(heads, 'zero-initialised head')})",
    )


def no_heads(hidden: int) -> HeadWeights:
    """Weights of no heads: lookup alone proposes."""
    return replace(untrained_heads(0, hidden), source="none")


class MedusaHeads(torch.nn.Module):
    """K residual heads: head j guesses token t+j+2 from the hidden state at t (arXiv 2401.10774, section 2.1.1).

    Args:
        weights: the heads; of none, nothing is to be called.
        lm_head: the backbone's projection, used where the heads have none of their own.
    """

    def __init__(self, weights: HeadWeights, lm_head: torch.nn.Linear) -> None:
        super().__init__()
        self.residual_weight = torch.nn.Parameter(weights.residual_weight.transpose(-1, -2).contiguous())
        self.residual_bias = torch.nn.Parameter(weights.residual_bias.clone())
        self.token_map = None if weights.token_map is None else torch.nn.Buffer(weights.token_map.clone())
        self.lm_head = lm_head
        self.projections = None
        if weights.projection is not None:
            self.projections = torch.nn.ParameterList(list(weights.projection))
        elif self.token_map is not None:
            self.projections = torch.nn.ParameterList([lm_head.weight.detach()[self.token_map]])

    def blocks(self) -> Blocks:
        """Weight [K, H, H] and bias [K, 1, H] of each residual block.

        A trace that runs the heads several times passes them on: it would store what is sliced anew each time.
        """
        layers = range(self.residual_weight.shape[1])
        return [(self.residual_weight[:, layer], self.residual_bias[:, layer, None]) for layer in layers]

    def states(self, hidden: torch.Tensor, blocks: Blocks | None = None) -> torch.Tensor:
        """Hidden rows [M, H] -> each head's own rows [K, M, H], ready for a projection."""
        state = hidden[None].expand(self.residual_weight.shape[0], *hidden.shape)
        for weight, bias in blocks or self.blocks():
            state = state + torch.nn.functional.silu(torch.matmul(state, weight) + bias)
        return state

    def forward(self, hidden: torch.Tensor, blocks: Blocks | None = None) -> torch.Tensor:
        """The hidden state of the winning row, [1, H] -> logits [K, V']."""
        state = self.states(hidden, blocks)[:, 0]  # [K, H]
        if self.projections is None:
            return self.lm_head(state)  # one pass over the shared projection
        if len(self.projections) == 1:
            return torch.nn.functional.linear(state, self.projections[0])
        rows = [
            torch.nn.functional.linear(row, weight)
            for row, weight in zip(state[:, None], self.projections, strict=True)
        ]
        return torch.cat(rows, dim=0)

    def full_logits(self, hidden: torch.Tensor, vocab_size: int, blocks: Blocks | None = None) -> torch.Tensor:
        """`forward` over the whole vocabulary, [K, V]: -inf where a draft vocabulary has no token."""
        logits = self(hidden, blocks)
        if self.token_map is None:
            return logits
        full = torch.full((logits.shape[0], vocab_size), -torch.inf, dtype=logits.dtype)
        return full.scatter(1, self.token_map.expand(logits.shape[0], -1), logits)

    def rank(self, hidden: torch.Tensor, topk: int, blocks: Blocks | None = None) -> torch.Tensor:
        """The best tokens of each head, [K, topk], from the hidden state [1, H] of the winning row."""
        ranked = self(hidden, blocks).topk(topk, dim=-1).indices
        return ranked if self.token_map is None else self.token_map[ranked]

    def residual(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [K, layers, H, H] and biases [K, layers, H] of the residual blocks, as checkpoints hold them."""
        return self.residual_weight.detach().transpose(-1, -2).clone(), self.residual_bias.detach().clone()
