"""Attention whose result for a row does not depend on where its keys lie in the cache, nor on the rows beside it.

A tree row finds the keys of its path scattered between those of other branches, a plain step finds the same keys one
behind another. A sum of fp32 numbers in another order differs in its last bit; the rows are quantised afterwards,
and a last bit that decides a rounding comes out as a whole step. So what is summed over keys is summed in fp64, where
the order is all but certain to be gone after rounding to fp32 (seen: 0 of 200 rows differ, 197 of 200 in fp32).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface

EXACT_ATTENTION_NAME = "medusa_tree_exact"


def exact_tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, N, head_dim]
    key: torch.Tensor,  # [1, H_kv, L, head_dim]
    value: torch.Tensor,  # [1, H_kv, L, head_dim]
    attention_mask: torch.Tensor,  # [1, 1, N, L] bool, True = visible
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **_kwargs: object,
) -> tuple[torch.Tensor, None]:
    """`attention.tree_attention`, reproducible by row.

    Returns:
        [1, N, H, head_dim] and None for the attention weights, as transformers expects.
    """
    _, heads, rows, head_dim = query.shape
    kv_heads = key.shape[1]
    scale = head_dim**-0.5 if scaling is None else scaling
    group = heads // kv_heads
    grouped = query.reshape(1, kv_heads, -1, head_dim) * scale  # [1, H_kv, group * N, head_dim]
    alone = group == 1  # a product with one row has another order of its own
    scores = (grouped.double() @ key.double().mT).float() if alone else grouped @ key.mT  # [1, H_kv, group * N, L]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    # The same for every layer: the graph computes it once. [1, 1, group * N, L]
    scores = scores + torch.where(attention_mask, 0.0, -torch.inf).repeat(1, 1, group, 1)
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp().double()
    out = ((weights @ value.double()) / weights.sum(dim=-1, keepdim=True)).float().reshape(1, heads, rows, head_dim)
    return out.transpose(1, 2), None


def use_exact_attention(model: Any) -> None:
    """Let a transformers model that was loaded with another attention function compute it so."""
    AttentionInterface.register(EXACT_ATTENTION_NAME, exact_tree_attention)
    model.set_attn_implementation(EXACT_ATTENTION_NAME)
