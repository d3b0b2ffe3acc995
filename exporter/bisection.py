"""Top-k and top-p without sorting, for engines that sort a fixed number of values at most: thresholds by search.

Both keep the logits x for which something about the larger ones is below a limit: their number below k, their weight
below the share p. So the threshold is found by dividing the interval it lies in, each time in one pass over the logits.
TensorRT takes minutes to build a long chain of halvings, and a second for the few passes of this.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# The interval is at most as wide as the logits, and as 104 temperatures; divided so often, by 2^33 in all, it is
# narrower than the distance of any two fp16 numbers in a range of 256, and than that of fp32 numbers above 1/2.
PASSES = 11
PARTS = 8
_NO_WEIGHT = 104.0  # exp of its negative is 0 in fp32


def weights_by_bisection(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """[R, V] weights in proportion to the processed probabilities, see `sampling.processed_weights`.

    Args:
        logits: [R, V] fp32.
        temperature, top_p, min_p: [1] fp32.
        top_k: [1] int64; V: off.
    """
    largest = logits.amax(dim=-1, keepdim=True)  # [R, 1]
    weights = ((logits - largest) / temperature).exp()
    # Below it nothing has weight, or nothing is
    least = torch.maximum(logits.amin(dim=-1, keepdim=True) - 1, largest - _NO_WEIGHT * temperature)

    def count_above(values: torch.Tensor) -> torch.Tensor:
        return (logits[:, None] > values).to(torch.float32).sum(dim=-1)  # exact up to 2^24

    last = _search(count_above, top_k.to(torch.float32), least, largest)
    kept = torch.where(logits > last, weights, 0.0)

    def weight_above(values: torch.Tensor) -> torch.Tensor:
        return torch.where(logits[:, None] > values, kept[:, None], 0.0).sum(dim=-1)

    share = torch.where(top_p < 1, top_p * kept.sum(dim=-1, keepdim=True), torch.inf)
    last = _search(weight_above, share, least, largest)
    return torch.where((logits > last) & (kept >= min_p), kept, 0.0)


def _search(
    above: Callable[[torch.Tensor], torch.Tensor], limit: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> torch.Tensor:
    """[R, 1] a value v below the threshold t, with none of the logits in (v, t): those above v are kept.

    Args:
        above: of values [R, M, 1] what the logits above each come to, [R, M]; does not rise with the value.
        limit: [1] or [R, 1]; t is the least logit at which `above` is below it.
        low, high: [R, 1], below and not below t.
    """
    width = high - low
    parts = torch.arange(1, PARTS, dtype=torch.float32) / PARTS
    for _ in range(PASSES):
        values = low + width * parts  # [R, PARTS - 1]
        below = (above(values[:, :, None]) >= limit).to(torch.float32).sum(dim=-1, keepdim=True)  # [R, 1], of `values`
        low, width = low + width * (below / PARTS), width / PARTS
    return low
