"""The repetition penalty in torch, row by row; the numpy reference: runtime/sampling.py."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PenaltyInputs(NamedTuple):
    """Inputs of the graphs that penalise repetition.

    Attributes:
        history: [T] int64, tokens of the prompt and the answer before this pass.
        repetition_penalty: [1] fp32, divides positive logits and multiplies negative ones.
    """

    history: torch.Tensor
    repetition_penalty: torch.Tensor


def penalise(logits: torch.Tensor, tokens: torch.Tensor, on_path: torch.Tensor, inputs: PenaltyInputs) -> torch.Tensor:
    """Logits [R, V] behind the penalty of every token of the history and of the row's own path.

    Args:
        logits: [R, V].
        tokens: [N] packed tokens.
        on_path: [R, N] bool, the packed rows that are the row itself or before it.
    """
    history = inputs.history.expand(logits.shape[0], -1)  # [R, T]
    penalised = logits.scatter(1, history, _penalised(logits.gather(1, history), inputs.repetition_penalty))
    # A token that lies on the path and beside it is written twice: both have to say the same.
    same = (tokens[:, None] == tokens[None]).to(logits.dtype)  # [N, N]
    repeated = on_path.to(logits.dtype) @ same > 0  # [R, N]
    columns = tokens.expand(logits.shape[0], -1)  # [R, N]
    scores = _penalised(logits.gather(1, columns), inputs.repetition_penalty)
    return penalised.scatter(1, columns, torch.where(repeated, scores, penalised.gather(1, columns)))


def _penalised(scores: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    return torch.where(scores < 0, scores * penalty, scores / penalty)
