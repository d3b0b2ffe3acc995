"""Many independent conversations through one pass over the weights: the engine that writes training data.

The round decodes one conversation as fast as it can; here throughput counts, so each of B rows is a conversation
of its own with its own length, and one pass advances all of them by one token. It runs in torch, so that a GPU does
the same work where there is one; on CPUs with bfloat16 instructions a pass takes a third of its time in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers.modeling_utils import AttentionInterface

from medusa_engine.exporter.cache import TracedCache
from medusa_engine.exporter.round import RowProjection

TOP = 64  # candidates a step returns per row; sampling is truncated to them
ATTENTION_NAME = "medusa_batch"


class StepResult(NamedTuple):
    """What one step says about each row.

    Attributes:
        top_ids: [B, TOP] int64, the most likely next tokens, best first.
        top_logprobs: [B, TOP] float32, their natural log probabilities.
        hidden: [B, H] float16, the state the LM head and the Medusa heads read.
    """

    top_ids: npt.NDArray[np.int64]
    top_logprobs: npt.NDArray[np.float32]
    hidden: npt.NDArray[np.float16]


def batch_attention(
    _module: torch.nn.Module,
    query: torch.Tensor,  # [B, H, 1, head_dim]
    key: torch.Tensor,  # [B, H_kv, L, head_dim]
    value: torch.Tensor,  # [B, H_kv, L, head_dim]
    attention_mask: torch.Tensor,  # [B, 1, 1, L] bool, True = visible
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **_kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of one query row; the heads of a group are its rows, so that keys and values are read once.

    Returns:
        [B, 1, H, head_dim] and None for the attention weights, as transformers expects.
    """
    batch, heads, _, head_dim = query.shape
    grouped = query.reshape(batch, key.shape[1], -1, head_dim)
    if softcap is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            grouped, key, value, attn_mask=attention_mask, scale=scaling
        )
    else:
        scores = (grouped @ key.transpose(2, 3)).float() * (head_dim**-0.5 if scaling is None else scaling)
        scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~attention_mask, -torch.inf)
        out = scores.softmax(dim=-1).to(value.dtype) @ value
    return out.reshape(batch, 1, heads, head_dim), None


class RowCache(TracedCache):
    """Duck-typed transformers cache over buffers that are written in place: row b at its own position."""

    def __init__(self, layers: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._batch = torch.arange(shape[0], device=device)
        self.positions = torch.zeros(shape[0], dtype=torch.int64, device=device)
        self.live = 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for buffers, new in ((self.keys, key), (self.values, value)):
            buffers[layer][self._batch, :, self.positions] = new[:, :, 0]
        return self.keys[layer][:, :, : self.live], self.values[layer][:, :, : self.live]


class BatchEngine:
    """B rows of one model.

    Args:
        model: a causal LM as `exporter.checkpoint.load_model` returns it; it is changed and cannot be used on.
        batch: B.
        max_length: tokens a row may have.
        dtype: of `device.DTYPES`: weights, cache and arithmetic.
        device: where it runs.
    """

    def __init__(
        self, model: Any, *, batch: int, max_length: int, dtype: str = "float32", device: str | torch.device = "cpu"
    ) -> None:
        AttentionInterface.register(ATTENTION_NAME, batch_attention)
        model.set_attn_implementation(ATTENTION_NAME)
        self._model = model.to(dtype=getattr(torch, dtype), device=device).eval()
        self._projection = RowProjection(model.get_output_embeddings())
        model.set_output_embeddings(self._projection)
        config = model.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._window = getattr(config, "sliding_window", None) or max_length
        self._kinds = set(getattr(config, "layer_types", None) or ())
        self.batch, self.max_length, self._device = batch, max_length, torch.device(device)
        self._cache = RowCache(
            config.num_hidden_layers, (batch, kv_heads, max_length, head_dim), self._model.dtype, self._device
        )

    def step(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> StepResult:
        """Feed token [B] at position [B] of every row; a row restarts by starting over at position 0."""
        cache = self._cache
        cache.live = int(positions.max()) + 1
        cache.positions = torch.from_numpy(positions).to(self._device)
        with torch.inference_mode():
            logits = (
                self._model(
                    input_ids=torch.from_numpy(tokens).to(self._device)[:, None],
                    position_ids=cache.positions[:, None],
                    attention_mask=self._mask(cache.positions, cache.live),
                    past_key_values=cache,
                    use_cache=True,
                )
                .logits[:, 0]
                .float()
            )  # [B, V]
            top = logits.topk(min(TOP, logits.shape[1]), dim=-1)
            logprobs = top.values - logits.logsumexp(dim=-1, keepdim=True)
            hidden = self._projection.rows.half()
        return StepResult(top.indices.cpu().numpy(), logprobs.cpu().numpy(), hidden.cpu().numpy())

    def _mask(self, positions: torch.Tensor, live: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """[B, 1, 1, L] bool: a row sees itself and what lies before it, inside a sliding window where there is one."""
        distance = positions[:, None] - torch.arange(live, device=self._device)  # [B, L]
        full = (distance >= 0)[:, None, None]
        local = full & (distance < self._window)[:, None, None]
        if self._kinds:
            return {"full_attention": full, "sliding_attention": local}
        return local
