"""The sliding window that a model's code applies, which its config alone does not tell."""

from __future__ import annotations

from typing import Any

import torch

from medusa_engine.runtime.errors import UserError

# A window so short that a few tokens tell whether it is applied, and to which layers.
_WINDOW = 3
_TOKENS = 12
_TOLERANCE = 1e-3  # of the largest logit


@torch.no_grad()
def sliding_window(model: Any) -> int | None:
    """Positions that a row of a window layer sees, itself included; None where the code knows no window.

    transformers' own masks are compared with ours on a few tokens, with a short window in place of the config's: some
    configs name a window that the code never applies, and a real one is longer than any check could be.

    Args:
        model: a transformers causal LM.

    Raises:
        UserError: the model applies its window to other layers than its config says.
    """
    config = model.config.get_text_config()
    window: int | None = getattr(config, "sliding_window", None)
    if not window:
        return None
    tokens = torch.arange(1, 1 + _TOKENS)[None] * 7 % config.vocab_size
    rows = torch.arange(_TOKENS)
    seen = rows[:, None] >= rows[None]
    full, local = (
        torch.where(mask, 0.0, torch.finfo(torch.float32).min)[None, None]
        for mask in (seen, seen & (rows[:, None] - rows[None] < _WINDOW))
    )
    usual = model.config._attn_implementation
    config.sliding_window = _WINDOW
    try:
        model.set_attn_implementation("eager")
        expected = model(tokens, use_cache=False).logits
        windowed = _same(model, tokens, window_masks(config, full, local), expected)
        ignored = not windowed and _same(model, tokens, full, expected)
    finally:
        config.sliding_window = window
        model.set_attn_implementation(usual)
    if not windowed and not ignored:
        raise UserError(
            f"{type(model).__name__}: its layers apply the sliding window of {window} otherwise than its config says",
            "this model cannot be exported faithfully; please report its config.json",
        )
    return window if windowed else None


def window_masks(config: Any, full: torch.Tensor, local: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
    """The masks as transformers' decoders take them: by type of layer where the config has types, else one for all."""
    if getattr(config, "layer_types", None):
        return {"full_attention": full, "sliding_attention": local}
    return local


def _same(model: Any, tokens: torch.Tensor, mask: Any, expected: torch.Tensor) -> bool:
    logits = model(tokens, attention_mask=mask, use_cache=False).logits
    return float((logits - expected).abs().max()) <= _TOLERANCE * float(expected.abs().max())
