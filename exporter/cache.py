"""The key/value cache object handed to transformers' decoder while it is traced or run in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from medusa_engine.plugins.compact_append_kv.body import (
    DOMAIN,
    DOMAIN_VERSION,
    OP_TYPE,
    PLUGIN_NAMESPACE_ATTRIBUTE,
)


class TracedCache:
    """What transformers' decoders ask of a cache whose masks and positions come from outside.

    Attributes:
        keys, values: per layer [B, H_kv, S_max, head_dim].
    """

    is_compileable = True
    layers: Sequence[object] = ()
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def get_seq_length(self, *_args: object) -> int:
        return 0

    def get_max_cache_shape(self, *_args: object) -> int:
        return self.keys[0].shape[2]

    def get_mask_sizes(self, *_args: object, **_kwargs: object) -> tuple[int, int]:
        return self.keys[0].shape[2], 0


class StaticCache(TracedCache):
    """Duck-typed transformers cache over static buffers.

    `update` compacts and appends as `medusa::CompactAppendKV` does (while `torch.onnx.export` traces it becomes
    that node) and hands the attention the live rows.

    Args:
        keys, values: per layer [1, H_kv, S_max, head_dim].
        past_length: [1] int64, committed rows P.
        pending_rows: [D+1] int64, packed rows accepted by the previous pass.
        pending_count: [1] int64, G.
        live_rows: P + G + N, rows the attention sees; a symbolic size while tracing. None for all S_max.
    """

    def __init__(
        self,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        past_length: torch.Tensor,
        pending_rows: torch.Tensor,
        pending_count: torch.Tensor,
        live_rows: int | None,
    ) -> None:
        self.keys = list(keys)
        self.values = list(values)
        self._state = (past_length, pending_rows, pending_count)
        self._live_rows = live_rows

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_index: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compact, append [1, H_kv, N, head_dim] and return the live rows [1, H_kv, P+G+N, head_dim], or all."""
        past = self.keys[layer_index], self.values[layer_index]
        if torch.onnx.is_in_onnx_export() or torch.compiler.is_exporting():
            present = torch.onnx.ops.symbolic_multi_out(
                f"{DOMAIN}::{OP_TYPE}",
                (*past, key, value, *self._state),
                {PLUGIN_NAMESPACE_ATTRIBUTE: DOMAIN},
                dtypes=(key.dtype, value.dtype),
                shapes=(past[0].shape, past[1].shape),
                version=DOMAIN_VERSION,
            )
        else:
            present = [self._compact_append(p, new) for p, new in zip(past, (key, value), strict=True)]
        self.keys[layer_index], self.values[layer_index] = present
        live = self._live_rows
        if live is None:
            return present[0], present[1]
        return present[0][:, :, :live], present[1][:, :, :live]

    def _compact_append(self, past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        past_length, rows, count = int(self._state[0]), self._state[1], int(self._state[2])
        present = past.clone()
        present[:, :, past_length : past_length + count] = past[:, :, past_length + rows[:count]]
        start = past_length + count
        present[:, :, start : start + new.shape[2]] = new
        return present
