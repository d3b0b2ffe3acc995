"""The key/value cache object handed to transformers' decoder while it is traced or run in torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch

from medusa_engine.plugins.compact_append_kv.body import (
    DOMAIN,
    DOMAIN_VERSION,
    OP_TYPE,
    PLUGIN_ATTRIBUTES,
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


def without_nan(new: torch.Tensor) -> torch.Tensor:
    """0 in the place of NaN; in the graph one cheap node, to which -inf, which no sane model has, is the same."""
    if torch.onnx.is_in_onnx_export() or torch.compiler.is_exporting():
        alpha = {"alpha": -math.inf}
        return torch.onnx.ops.symbolic("ThresholdedRelu", (new,), alpha, dtype=new.dtype, shape=new.shape, version=22)
    return torch.where(new.isnan(), 0.0, new)


def in_place_of_nan(rows: int, root_row: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[N, 1]: 0 for the drafts, which stand behind the root row [1]; NaN for what is part of every answer."""
    return torch.where(torch.arange(rows) > root_row, 0.0, torch.nan).to(dtype)[:, None]


class StaticCache(TracedCache):
    """Duck-typed transformers cache over static buffers.

    `update` compacts and appends as `medusa::CompactAppendKV` does (while `torch.onnx.export` traces it becomes
    that node) and hands the attention the live rows.

    The attention weighs rows that a query does not see with 0, and 0 * NaN is NaN: a draft whose hidden state is NaN
    would reach every row of its pass. Its keys and values are therefore taken for 0; its own logits stay NaN. NaN of a
    committed row has to reach all rows behind it: one layer where it is kept is enough.

    Args:
        keys, values: per layer [1, H_kv, S_max, head_dim].
        past_length: [1] int64, committed rows P.
        pending_rows: [D+1] int64, packed rows accepted by the previous pass.
        pending_count: [1] int64, G.
        live_rows: P + G + N, rows the attention sees; a symbolic size while tracing. None for all S_max.
        in_place_of_nan: [N, 1], what stands for keys and values of a row whose values are NaN, see `in_place_of_nan`.
        keeping_nan: layers where that is so; in the others 0 stands for NaN of any row.
    """

    def __init__(
        self,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        past_length: torch.Tensor,
        pending_rows: torch.Tensor,
        pending_count: torch.Tensor,
        live_rows: int | None,
        in_place_of_nan: torch.Tensor,
        keeping_nan: Collection[int],
    ) -> None:
        self.keys = list(keys)
        self.values = list(values)
        self._state = (past_length, pending_rows, pending_count)
        self._live_rows = live_rows
        self._in_place_of_nan = in_place_of_nan
        self._keeping_nan = keeping_nan

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_index: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compact, append [1, H_kv, N, head_dim] and return the live rows [1, H_kv, P+G+N, head_dim], or all."""
        past = self.keys[layer_index], self.values[layer_index]
        if layer_index in self._keeping_nan:
            nan = value.isnan()  # and so are the keys, of the same hidden state
            key, value = (torch.where(nan, self._in_place_of_nan, new) for new in (key, value))
        else:
            key, value = without_nan(key), without_nan(value)
        if torch.onnx.is_in_onnx_export() or torch.compiler.is_exporting():
            present = torch.onnx.ops.symbolic_multi_out(
                f"{DOMAIN}::{OP_TYPE}",
                (*past, key, value, *self._state),
                PLUGIN_ATTRIBUTES,
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
