"""Draws from the target's processed distribution in torch, row by row; the numpy reference: runtime/sampling.py."""

from __future__ import annotations

from typing import NamedTuple

import torch

from medusa_engine.exporter.bisection import weights_by_bisection

_BLOCK = 256  # tokens: a draw finds the block first, then the token in it
_BELOW = 1 - 2**-23  # the next fp32 number below 1


class SamplingInputs(NamedTuple):
    """Inputs of the graphs that sample.

    Attributes:
        uniforms: [R] fp32 in (0, 1), one for each row with logits.
        temperature: [1] fp32, above 0; where shapes are fixed 0 too, which is greedy.
        top_k: [1] int64; more than there are `ranks`, or V: off.
        top_p, min_p: [1] fp32; 1 and 0: off.
        ranks: [C] of any content: its length is the number of largest logits to be sorted. `top_k` if that is given,
            all V for `top_p` alone, else 1: sorting the vocabulary costs more than everything else here. None where
            shapes are fixed: nothing is sorted.
    """

    uniforms: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    ranks: torch.Tensor | None

    def rows(self, rows: torch.Tensor) -> SamplingInputs:
        """The same for some of the rows with logits."""
        return self._replace(uniforms=self.uniforms.index_select(0, rows))


def sample(logits: torch.Tensor, inputs: SamplingInputs, best_token: torch.Tensor) -> torch.Tensor:
    """[R] tokens drawn from logits [R, V] behind temperature, top-k, top-p and min-p; `best_token` [R]: argmax."""
    tokens = draw(processed_weights(logits, inputs), inputs.uniforms)
    return tokens if inputs.ranks is not None else torch.where(inputs.temperature > 0, tokens, best_token)


def processed_weights(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """[R, V] weights in proportion to the processed probabilities; the largest of a row is 1."""
    if inputs.ranks is None:
        return weights_by_bisection(logits, inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p)
    count = inputs.ranks.shape[0]
    top = torch.topk(logits, count, dim=-1).values  # [R, C], descending
    largest = top[:, :1]
    last = torch.where(inputs.top_k > count, -torch.inf, top[:, -1:])  # [R, 1]: least logit that top-k keeps
    weights = torch.where(logits >= last, ((logits - largest) / inputs.temperature).exp(), 0.0)

    ranked = ((top - largest) / inputs.temperature).exp()  # [R, C]
    before = ranked.cumsum(dim=-1) - ranked  # weight of the tokens ranked before each
    nucleus = (before < inputs.top_p * weights.sum(dim=-1, keepdim=True)).to(torch.int64).sum(dim=-1, keepdim=True)
    last = torch.where(inputs.top_p < 1, top.gather(1, (nucleus - 1).clamp(min=0)), -torch.inf)  # [R, 1]
    return torch.where((logits >= last) & (weights >= inputs.min_p), weights, 0.0)


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """[R] tokens: of weights [R, V] the first at which the cumulative weight exceeds the uniform's share of all.

    In two levels: one sum over a whole vocabulary in fp32 would lose its small terms, and be slow. Where no
    weight is above 0, as behind logits that are NaN, any token.
    """
    vocab_size = weights.shape[1]
    padding = -vocab_size % _BLOCK
    blocks = torch.nn.functional.pad(weights, (0, padding)).reshape(-1, (vocab_size + padding) // _BLOCK, _BLOCK)
    sums = blocks.sum(dim=-1)  # [R, B]
    upper = sums.cumsum(dim=-1)
    share = torch.minimum(uniforms[:, None] * upper[:, -1:], upper[:, -1:] * _BELOW)  # [R, 1]
    block = _first_above(upper, share)  # [R, 1]
    index = block[:, :, None].expand(-1, 1, _BLOCK)
    inner = blocks.gather(1, index)[:, 0].cumsum(dim=-1)  # [R, _BLOCK]
    rest = share - (upper - sums).gather(1, block)
    rest = torch.minimum(rest.clamp(min=0), inner[:, -1:] * _BELOW)
    return (block * _BLOCK + _first_above(inner, rest))[:, 0].clamp(max=vocab_size - 1)


def _first_above(cumulative: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """[R, 1] first column at which `cumulative` [R, C] exceeds `share` [R, 1]; the last if none does."""
    return (cumulative <= share).to(torch.int64).sum(dim=-1, keepdim=True).clamp(max=cumulative.shape[-1] - 1)


def likely_and_threshold(
    logits: torch.Tensor,
    best_token: torch.Tensor,
    temperature: torch.Tensor,
    posterior_threshold: torch.Tensor,
    posterior_alpha: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [R, V] at a temperature, and the threshold min(epsilon, alpha * exp(-entropy)) [R] of each row.

    Args:
        logits: [R, V].
        best_token: [R] their argmax.
        temperature, posterior_threshold, posterior_alpha: [1].
    """
    best = best_token[:, None]  # [R, 1]
    # Finite also where a logit is -inf, of probability 0: 0 * -inf is not 0
    scaled = ((logits - logits.gather(1, best)) / temperature).clamp(min=-1e30)  # [R, V] <= 0
    probabilities = scaled.softmax(dim=-1)
    # entropy = log(sum of exp(scaled)) - sum of p * scaled, and p of the best, whose `scaled` is 0, is 1 / sum
    mean = (probabilities * scaled).sum(dim=-1)  # [R]; a batched product would take ten times as long
    exp_minus_entropy = probabilities.gather(1, best)[:, 0] * mean.exp()
    return probabilities, torch.minimum(posterior_threshold, posterior_alpha * exp_minus_entropy)
