"""What the checkpoint itself says, in transformers: every path of a tree as a sequence of its own, no tree mask."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from medusa_engine.exporter.heads import MedusaHeads
from medusa_engine.runtime.tree_buffers import TreeBuffers

Floats = npt.NDArray[np.float32]

_PATHS = 8  # of a tree at once: each has a copy of the cache


class Rows(NamedTuple):
    """Target logits [N, V], and the hidden rows [N, H] that they and the heads read."""

    logits: Floats
    hidden: torch.Tensor


class Reference:
    """A transformers decoder with eager attention over transformers' own cache, which holds the published tokens.

    Args:
        model: from `checkpoint.load_model`, nothing traced yet.
        heads: of the engine, or None where they are not at hand.

    Attributes:
        last: the row of the token that was appended last; None while the cache is empty.
    """

    def __init__(self, model: Any, heads: MedusaHeads | None) -> None:
        self._model = model
        self._heads = heads
        self._hidden = torch.empty(0)
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values [1, H_kv, T, head_dim]
        self.last: Rows | None = None
        model.set_attn_implementation("eager")
        model.get_output_embeddings().register_forward_pre_hook(self._keep_hidden)

    @property
    def layers(self) -> int:
        return int(self._model.config.get_text_config().num_hidden_layers)

    @property
    def has_heads(self) -> bool:
        return self._heads is not None

    def start(self) -> None:
        """Empty the cache."""
        self._layers = []
        self.last = None

    @torch.inference_mode()
    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the cache."""
        logits, hidden, self._layers = self._forward(torch.tensor([list(token_ids)]), self._layers, kept=1)
        self.last = Rows(logits[0].numpy(), hidden[0])

    @torch.inference_mode()
    def tree(self, tokens: npt.NDArray[np.int64], tree: TreeBuffers) -> Rows:
        """Rows of a packed tree behind the cache, which stays as it is.

        Each path from the root to a leaf is a sequence with the usual causal mask and consecutive positions.
        """
        paths = tree.retrieve_indices[:, : int(tree.position_offsets.max()) + 1]  # [paths, edges + 1]
        ids = torch.from_numpy(np.where(paths >= 0, tokens[np.maximum(paths, 0)], 0))  # behind a short path: anything
        rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for begin in range(0, len(paths), _PATHS):
            some = ids[begin : begin + _PATHS]
            logits, hidden, _ = self._forward(some, self._layers)
            for path, path_logits, path_hidden in zip(paths[begin:], logits, hidden, strict=False):
                for place, row in enumerate(path.tolist()):
                    if row >= 0:
                        rows.setdefault(row, (path_logits[place], path_hidden[place]))
        ordered = [rows[row] for row in range(len(tokens))]
        return Rows(
            torch.stack([logits for logits, _ in ordered]).numpy(), torch.stack([hidden for _, hidden in ordered])
        )

    def cache(self) -> dict[str, npt.NDArray[Any]]:
        """`key.L` and `value.L` -> [1, H_kv, T, head_dim] of the T tokens."""
        named = {}
        for layer, (key, value) in enumerate(self._layers):
            named |= {f"key.{layer}": key.numpy(), f"value.{layer}": value.numpy()}
        return named

    @torch.inference_mode()
    def drafts(self, hidden: torch.Tensor, topk: int) -> tuple[npt.NDArray[np.int64], Floats]:
        """The heads on a hidden row [H]: their best tokens [K, topk], and logits [K, V], -inf outside their choices."""
        assert self._heads is not None
        row = hidden[None]
        vocab_size = self._model.config.get_text_config().vocab_size
        return self._heads.rank(row, topk).numpy(), self._heads.full_logits(row, vocab_size).numpy()

    def _forward(
        self, ids: torch.Tensor, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], *, kept: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """[B, T] tokens behind a cache of one sequence -> logits [B, T, V], hidden rows [B, T, H], longer caches.

        Args:
            kept: logits and hidden rows of so many of the last tokens; 0 for all.
        """
        batch = len(ids)
        copies = [tuple(tensor.expand(batch, -1, -1, -1) for tensor in pair) for pair in layers]
        cache = DynamicCache(copies or None)  # without the config: sliding layers keep all rows, too
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # later releases of transformers call it `cache`
            out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=kept)
        grown = [(layer.keys, layer.values) for layer in cache.layers]
        return out.logits, self._hidden, grown

    def _keep_hidden(self, _module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        self._hidden = inputs[0]
