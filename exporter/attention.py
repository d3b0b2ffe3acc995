"""The attention function that transformers' decoders call while a round is traced."""

from __future__ import annotations

import torch
from transformers.modeling_utils import AttentionInterface

ATTENTION_NAME = "medusa_tree"
Mask = torch.Tensor | dict[str, torch.Tensor]  # one for all layers, or one for each type of layer

_HIDDEN = -30000.0  # in fp16 finite with any score added, and its exp is 0


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, N, head_dim]
    key: torch.Tensor,  # [1, H_kv, L, head_dim]
    value: torch.Tensor,  # [1, H_kv, L, head_dim]
    attention_mask: torch.Tensor,  # [1, 1, N, L] bool, True = visible, or numbers that are added to the scores
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_kwargs: object,
) -> tuple[torch.Tensor, None]:
    """One standard ONNX `Attention` node; grouped key/value heads are not repeated.

    Returns:
        [1, N, H, head_dim] and None for the attention weights, as transformers expects.

    Raises:
        NotImplementedError: the layer has attention sinks, which the node does not.
    """
    if s_aux is not None:
        raise NotImplementedError("attention sinks are not exported")
    out = torch.onnx.ops.attention(
        query, key, value, attention_mask, scale=scaling, softcap=0.0 if softcap is None else softcap
    )[0]
    return out.transpose(1, 2), None


def additive_mask(mask: Mask, dtype: torch.dtype) -> Mask:
    """Of a bool mask the one that adds 0 where a row is visible and hides the others."""
    if isinstance(mask, dict):
        return {kind: torch.where(visible, 0.0, _HIDDEN).to(dtype) for kind, visible in mask.items()}
    return torch.where(mask, 0.0, _HIDDEN).to(dtype)


def register_tree_attention() -> None:
    """Make `attn_implementation=ATTENTION_NAME` known to transformers."""
    AttentionInterface.register(ATTENTION_NAME, tree_attention)
