"""What each acceptance policy makes of the logits of one pass."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from medusa_engine.exporter.acceptance import Paths, accept_likely, accept_tokens
from medusa_engine.exporter.rejection import RejectionInputs, accept_drafts
from medusa_engine.exporter.sampling import SamplingInputs, draw, likely_and_threshold, processed_weights, sample
from medusa_engine.exporter.stopping import NO_TOKEN, StopInputs, finite_rows, publish
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
        published: of the path it accepts, as `publish` gives it.
        next_root: [1] root of the next tree; NO_TOKEN where the logits decide none.
        tokens: [R] the token behind each row with logits, or NO_TOKEN, for plain steps; None where a policy has none.
    """

    published: dict[str, torch.Tensor]
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
    stop: StopInputs,
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
        chosen[SAMPLE] = sample(logits, sampling, best_token)
    chosen = {policy: _decided(logits, tokens) for policy, tokens in chosen.items()}
    verdicts = {}
    for policy, tokens in chosen.items():
        by_row = tokens.index_select(0, logit_index)  # [N]
        published = publish(accept_tokens(paths, by_row), stop)
        verdicts[policy] = Verdict(published, by_row.index_select(0, published["winning_row"]), tokens)
    if REJECTION in policies:
        weights = processed_weights(logits, sampling)
        accepted, next_root = accept_drafts(paths, weights, logit_index, sampling.uniforms, rejection)
        row = logit_index.index_select(0, accepted.winning_row)  # [1]
        next_root = _decided(logits.index_select(0, row), next_root)
        verdicts[REJECTION] = Verdict(
            publish(accepted, stop), next_root, _decided(logits, draw(weights, sampling.uniforms))
        )
    if TYPICAL in policies:
        probabilities, threshold = likely_and_threshold(
            logits, best_token, sampling.temperature, typical.posterior_threshold, typical.posterior_alpha
        )
        parents = paths.by_row(logit_index)[:, :-1]  # [paths, D]
        edges = parents * probabilities.shape[1] + paths.tokens[:, 1:]
        likely = probabilities.reshape(-1).index_select(0, edges.reshape(-1)).view_as(edges)
        if sampling.ranks is None:  # at temperature 0 the argmax alone is likely
            best = paths.tokens[:, 1:] == best_token.index_select(0, parents.reshape(-1)).view_as(parents)
            likely = torch.where(sampling.temperature > 0, likely, best.to(likely.dtype))
            threshold = torch.where(sampling.temperature > 0, threshold, 0.5)
        published = publish(accept_likely(paths, likely, threshold.index_select(0, logit_index)), stop)
        row = logit_index.index_select(0, published["winning_row"])  # [1]
        row_logits, row_best = logits.index_select(0, row), best_token.index_select(0, row)  # [1, V], [1]
        drawn = sample(row_logits, sampling.rows(row), row_best)
        next_root = torch.where(typical.root_drawn, drawn, row_best)
        verdicts[TYPICAL] = Verdict(published, _decided(row_logits, next_root), None)
    return verdicts


def _decided(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The tokens [R] that were chosen by logits [R, V], NO_TOKEN where these decide none."""
    return torch.where(finite_rows(logits, tokens), tokens, NO_TOKEN)
