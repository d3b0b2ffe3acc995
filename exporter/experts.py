"""Mixture-of-experts layers as standard operators: every expert computes every row, and the router weights them.

Which experts a row goes to depends on data. transformers' own ways sort the rows by expert, which does not trace, or
copy the chosen experts' weights for every row. Here an expert that a row did not choose counts with weight 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

_NAME = "medusa_dense"


@contextmanager
def dense_experts(model: Any) -> Iterator[None]:
    """Let a model's mixture-of-experts layers, if it has any, compute in this way."""
    ALL_EXPERTS_FUNCTIONS.register(_NAME, _dense)
    usual = model.get_experts_implementation()
    model.set_experts_implementation(_NAME)
    try:
        yield
    finally:
        model.set_experts_implementation(usual)


def _dense(
    module: Any,
    hidden_states: torch.Tensor,  # [N, H]
    top_k_index: torch.Tensor,  # [N, experts per row]
    top_k_weights: torch.Tensor,  # [N, experts per row]
) -> torch.Tensor:
    """What transformers' experts functions return, [N, H]; E experts."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    rows = hidden_states.unsqueeze(0).expand(module.num_experts, -1, -1)  # [E, N, H]
    inner = _project(module, first, rows)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outer = _project(module, "down_proj", inner)  # [E, N, H]
    if module.has_post_expert_norm:
        outer = module.post_expert_norm(outer)
    share = torch.zeros(hidden_states.shape[0], module.num_experts, dtype=outer.dtype)  # [N, E]
    share = share.scatter_add(1, top_k_index, top_k_weights.to(outer.dtype))
    return (outer * share.t().unsqueeze(-1)).sum(0).to(hidden_states.dtype)


def _project(module: Any, name: str, rows: torch.Tensor) -> torch.Tensor:
    """[E, N, out] of [E, N, in], each expert with its own weight and bias."""
    weight = getattr(module, name)  # [E, out, in], or transposed
    out = torch.matmul(rows, weight if module.is_transposed else weight.transpose(1, 2))
    return out + getattr(module, f"{name}_bias").unsqueeze(1) if module.has_bias else out
