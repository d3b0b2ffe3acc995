"""Rejection sampling of a chain of drafts in torch; the numpy reference: `accept_rejection` in runtime/posterior.py."""

from __future__ import annotations

from typing import NamedTuple

import torch

from medusa_engine.exporter.acceptance import AcceptedPath, Paths, accept_passed
from medusa_engine.exporter.sampling import SamplingInputs, draw, processed_weights


class RejectionInputs(NamedTuple):
    """Inputs of the graphs of `rejection`.

    Attributes:
        proposal: [K, V] fp32, q: the probabilities that the last pass drew the drafts from, by head.
        accept_uniforms: [R] fp32, one for each row with logits; independent of `SamplingInputs.uniforms`.
        draft_uniforms: [2K] fp32, of the positions from that of this pass's root on; independent of both.
    """

    proposal: torch.Tensor
    accept_uniforms: torch.Tensor
    draft_uniforms: torch.Tensor


def accept_drafts(
    paths: Paths, weights: torch.Tensor, logit_index: torch.Tensor, uniforms: torch.Tensor, inputs: RejectionInputs
) -> tuple[AcceptedPath, torch.Tensor]:
    """What a chain accepts, and the next root [1].

    Args:
        paths: the chain's only path.
        weights: [R, V] in proportion to the target's processed probabilities p.
        logit_index: [N] place of each packed row among the rows with logits.
        uniforms: [R], of the tokens drawn from the target: the correction, or the token behind the last draft.
    """
    chain = Paths(paths.rows[:1], paths.tokens[:1], paths.valid[:1])
    rows = chain.by_row(logit_index)[0]  # [D+1]
    target = weights.index_select(0, rows)
    target = target / target.sum(dim=-1, keepdim=True)  # [D+1, V]
    drafts = chain.tokens[0, 1:, None]  # [D, 1]
    likely = target[:-1].gather(1, drafts)[:, 0]  # [D]: p of each draft
    behind = drafts.shape[0] - inputs.proposal.shape[0]  # D - K: paths of lookup nodes may be longer than a chain
    proposal = torch.nn.functional.pad(inputs.proposal, (0, 0, 0, behind))  # [D, V]
    proposed = proposal.gather(1, drafts)[:, 0]  # [D]: q of each draft
    accepts = inputs.accept_uniforms.index_select(0, rows[:-1]) * proposed < likely
    accepted = accept_passed(chain, accepts[None])

    last = accepted.length - 1  # [1]: the winning row's place in the chain
    rejected = torch.nn.functional.pad(chain.valid[0, 1:].to(weights.dtype), (0, 1))  # [D+1]: 0 behind the last draft
    proposal = torch.nn.functional.pad(proposal, (0, 0, 0, 1)) * rejected[:, None]  # [D+1, V]
    target, proposal = target.index_select(0, last), proposal.index_select(0, last)  # [1, V]
    residual = (target - proposal).clamp(min=0)
    # A draft that only rounding rejects leaves nothing: p and q are one distribution then
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, target)
    return accepted, draw(residual, uniforms.index_select(0, rows.index_select(0, last)))


def draw_drafts(
    logits: torch.Tensor, sampling: SamplingInputs, draft_uniforms: torch.Tensor, accepted_count: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each head [K], and the probabilities it was drawn from [K, V], those of the next pass's `proposal`.

    Temperature, top-k, top-p and min-p are the target's: drafts that it could not accept are not drawn.

    Args:
        logits: [K, V] of the heads at the winning row.
        accepted_count: [1] G, which places the drafts.
    """
    weights = processed_weights(logits, sampling)
    places = (accepted_count - 1).clamp(min=0) + torch.arange(logits.shape[0])  # [K]; no count behind a finished answer
    tokens = draw(weights, draft_uniforms.index_select(0, places))
    return tokens, weights / weights.sum(dim=-1, keepdim=True)
