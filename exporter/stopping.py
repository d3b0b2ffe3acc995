"""Where an answer ends inside a pass, in torch; the numpy reference: runtime/stopping.py."""

from __future__ import annotations

from typing import NamedTuple

import torch

from medusa_engine.exporter.acceptance import AcceptedPath

NO_TOKEN = -1  # the next root where the logits decide none


class StopInputs(NamedTuple):
    """What ends an answer.

    Attributes:
        stop_ids: [S] int64, S >= 0, padded with -1.
        token_budget: [1] int64, tokens that may still be published, at least 0.
        finished: [1] bool, the answer has ended: nothing is published.
    """

    stop_ids: torch.Tensor
    token_budget: torch.Tensor
    finished: torch.Tensor


def publish(path: AcceptedPath, stop: StopInputs) -> dict[str, torch.Tensor]:
    """Publish the accepted tokens up to and with the first stop token, and no more than the budget.

    Returns:
        `accepted_tokens` [D+1], -1 behind the [1] `accepted_count`; `next_token_budget` [1]; `next_finished` [1];
        `winning_row` [1], of the last token published; `path_rows` [D+1].
    """
    slots = torch.arange(path.tokens.shape[0])  # [D+1]
    beyond = slots.shape[0] + 1
    ends = torch.where(path.tokens[:, None] == stop.stop_ids, slots[:, None] + 1, beyond)  # [D+1, S]
    stop_end = torch.cat([ends.reshape(-1), torch.full((1,), beyond)]).amin(dim=0, keepdim=True)  # S may be 0
    most = torch.minimum(stop_end, torch.where(stop.finished, 0, stop.token_budget))  # [1]
    count = torch.minimum(path.length, most)
    return {
        "accepted_tokens": torch.where(slots < count, path.tokens, -1),
        "accepted_count": count,
        "next_token_budget": stop.token_budget - count,
        "next_finished": path.length >= most,
        "winning_row": path.rows.index_select(0, (count - 1).clamp(min=0)),
        "path_rows": path.rows,
    }


def finite_rows(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[R] whether logits [R, V] decide the token that was chosen by them: none is NaN or +inf, and not all are -inf.

    Args:
        tokens: [R], of each row the argmax, or a token drawn.
    """
    sums = logits.sum(dim=-1, dtype=torch.float32)  # NaN if one is
    return (sums < torch.inf) & (logits.gather(1, tokens[:, None])[:, 0] > -torch.inf)
