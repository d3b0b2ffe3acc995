"""What is fixed when a round is traced: its sizes, and what will run it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from medusa_engine.runtime.manifest import Limits


@dataclass(frozen=True)
class RoundShape:
    """Sizes fixed in the graph.

    Attributes:
        layers, kv_heads, head_dim: of the cache.
        cache_rows: S_max.
        heads: K, may be 0 where there is lookup.
        topk: TOPK, ranks each head offers.
        max_tree_nodes: N of every tree where shapes are fixed.
        vocab_size: V.
        lookup: lookup nodes offered; the deepest tree has depth D = max(heads, lookup), pending_rows D+1 entries.
        stop_ids: S where shapes are fixed.
        fixed: every size but N and R is fixed, attention covers the whole cache, and nothing depends on data: for
            TensorRT. Else the numbers of rows, paths and candidates are free, and attention reads the live rows alone.
        exact: a row's logits are the same bits in every pass, see `exact_attention.py`.
        dtype: of weights, cache and mask; logits are compared in fp32.
    """

    layers: int
    kv_heads: int
    head_dim: int
    cache_rows: int
    heads: int
    topk: int
    max_tree_nodes: int
    vocab_size: int
    lookup: int = 0
    stop_ids: int = 1
    fixed: bool = False
    exact: bool = False
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, limits: Limits, *, stop_ids: int, fixed: bool, exact: bool, dtype: torch.dtype) -> RoundShape:
        return cls(
            layers=limits.layers,
            kv_heads=limits.kv_heads,
            head_dim=limits.head_dim,
            cache_rows=limits.cache_rows,
            heads=limits.heads,
            topk=limits.topk,
            max_tree_nodes=limits.max_tree_nodes,
            vocab_size=limits.vocab_size,
            lookup=limits.lookup,
            stop_ids=max(1, stop_ids),
            fixed=fixed,
            exact=exact,
            dtype=dtype,
        )

    @property
    def depth(self) -> int:
        return max(self.heads, self.lookup)

    @property
    def cache_size(self) -> tuple[int, int, int, int]:
        """Of the keys, or the values, of one layer."""
        return (1, self.kv_heads, self.cache_rows, self.head_dim)
