"""The losses of Medusa-2 (arXiv 2401.10774, sections 2.2.2 and 2.3.2), as sums that any split of a batch adds up to."""

from __future__ import annotations

import torch

from medusa_engine.training.labels import IGNORED, head_weights

DIRECT_LAMBDA = 0.2  # beside the cross-entropy of the LM head
DISTILLED_LAMBDA = 0.01  # beside the KL divergence from the teacher


def loss_weights(heads: int, lambda_0: float, *, heads_only: bool) -> torch.Tensor:
    """Weights [1 + heads] float32 of the backbone's loss and of each head's: 1, then lambda_0 * 0.8^k with k from 1.

    While only the heads are trained, the backbone's loss weighs nothing and lambda_0 is left out.
    """
    weights = torch.from_numpy(head_weights(heads)).float()
    backbone = torch.zeros(1) if heads_only else torch.ones(1)
    return torch.cat([backbone, weights if heads_only else lambda_0 * weights])


def combine(sums: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The loss [], from sums and label counts [1 + heads].

    Args:
        sums: over the labels of this part of a batch.
        counts: labels in the whole batch; a head without any has no loss.
        weights: as `loss_weights`.
    """
    return (sums / counts.clamp(min=1) * weights.to(sums.device)).sum()


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum [] of the cross-entropy of logits [M, V] with labels [M], IGNORED ones left out."""
    return torch.nn.functional.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


def divergence_sum(teacher: torch.Tensor, student: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum [] of KL(teacher || student) over the rows of logits [M, V] that have a label [M]."""
    kept = labels != IGNORED
    target = torch.log_softmax(teacher[kept].float(), dim=-1)
    guess = torch.log_softmax(student[kept].float(), dim=-1)
    return torch.nn.functional.kl_div(guess, target, reduction="sum", log_target=True)


def hits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """How many labels [M] are the best and among the best five of logits [M, V]: [2] float32."""
    best = logits.topk(min(5, logits.shape[-1]), dim=-1).indices == labels[:, None]  # IGNORED is no token
    return torch.stack([best[:, :1].sum(), best.sum()]).float()
