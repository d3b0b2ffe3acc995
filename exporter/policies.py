"""What each acceptance policy makes of the logits of one pass."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from medusa_engine.exporter.acceptance import Paths, accept_likely, accept_tokens
from medusa_engine.exporter.rejection import RejectionInputs, accept_drafts
from medusa_engine.exporter.sampling import SamplingInputs, draw, likely_and_threshold, processed_weights, sample
from medusa_engine.runtime.policy import GREEDY, REJECTION, SAMPLE, TYPICAL


class TypicalInputs(NamedTuple):
    """Inputs of the graphs of `typical`, see `AcceptancePolicy`.

    Attributes:
        posterior_threshold, posterior_alpha: [1] fp32.
        root_drawn: [1] bool, the token behind the accepted ones is drawn, not the argmax.
    """

    posterior_threshold: torch.Tensor
    posterior_alpha: torch.Tensor
    root_drawn: torch.Tensor


class Verdict(NamedTuple):
    """What a policy decides.

    Attributes:
        accepted: of the tree, as `accept_tokens` gives it.
        next_root: [1] root of the next tree.
        tokens: [R] the token behind each row with logits, for plain steps; None where a policy has none.
    """

    accepted: dict[str, torch.Tensor]
    next_root: torch.Tensor
    tokens: torch.Tensor | None


def judge(
    policies: Collection[str],
    logits: torch.Tensor,
    paths: Paths,
    logit_index: torch.Tensor,
    sampling: SamplingInputs,
    typical: TypicalInputs,
    rejection: RejectionInputs,
) -> dict[str, Verdict]:
    """The verdict of greedy and of each of the policies.

    Args:
        logits: [R, V].
        paths: of the packed tree.
        logit_index: [N] place of each packed row among the rows with logits.
    """
    best_token = logits.argmax(dim=-1)  # [R]
    chosen = {GREEDY: best_token}  # policy -> the target's token behind each row with logits, [R]
    if SAMPLE in policies:
        chosen[SAMPLE] = sample(logits, sampling)
    verdicts = {}
    for policy, tokens in chosen.items():
        by_row = tokens.index_select(0, logit_index)  # [N]
        accepted = accept_tokens(paths, by_row)
        verdicts[policy] = Verdict(accepted, by_row.index_select(0, accepted["winning_row"]), tokens)
    if REJECTION in policies:
        weights = processed_weights(logits, sampling)
        accepted, next_root = accept_drafts(paths, weights, logit_index, sampling.uniforms, rejection)
        verdicts[REJECTION] = Verdict(accepted, next_root, draw(weights, sampling.uniforms))
    if TYPICAL in policies:
        probabilities, threshold = likely_and_threshold(
            logits, best_token, sampling.temperature, typical.posterior_threshold, typical.posterior_alpha
        )
        parents = paths.by_row(logit_index)[:, :-1]  # [paths, D]
        edges = parents * probabilities.shape[1] + paths.tokens[:, 1:]
        likely = probabilities.reshape(-1).index_select(0, edges.reshape(-1)).view_as(edges)
        accepted = accept_likely(paths, likely, threshold.index_select(0, logit_index))
        row = logit_index.index_select(0, accepted["winning_row"])  # [1]
        drawn = sample(logits.index_select(0, row), sampling.rows(row))
        next_root = torch.where(typical.root_drawn, drawn, best_token.index_select(0, row))
        verdicts[TYPICAL] = Verdict(accepted, next_root, None)
    return verdicts
