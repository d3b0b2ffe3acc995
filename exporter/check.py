"""Run the exported round once beside transformers, before the bundle is put in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch

from medusa_engine.exporter.round import RoundShape
from medusa_engine.exporter.trace import cache_names
from medusa_engine.runtime.errors import UserError

CHECK_TOKENS = 24
# fp32 logits of two correct implementations differ by rounding only; a wrong row or position by far more.
TOLERANCE = 1e-3


def check_logits(model: Any, graph: Path, shape: RoundShape) -> float:
    """Compare the graph's logits on a short prompt with transformers' own eager attention.

    Args:
        model: the backbone that was traced.
        graph: a round graph that outputs its logits too.

    Returns:
        The largest difference, relative to the largest logit.

    Raises:
        UserError: they differ by more than `TOLERANCE`.
    """
    vocab_size = model.config.get_text_config().vocab_size
    rows = min(CHECK_TOKENS, shape.cache_rows - shape.depth - 1)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, vocab_size, size=(1, rows)))
    traced_attention = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            expected = model(ids, use_cache=False).logits[0].numpy()  # [N, V]
    finally:
        model.set_attn_implementation(traced_attention)

    options = ort.SessionOptions()
    options.log_severity_level = 3  # errors only: it would warn that this run copies the cache
    session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    paths = np.full((1, shape.depth + 1), -1)
    paths[0, 0] = rows - 1
    feed = {
        "input_ids": ids.numpy(),
        "position_ids": np.arange(rows)[None],
        "tree_mask": np.tri(rows, dtype=np.bool_),
        "logit_rows": np.arange(rows),
        "retrieve_indices": paths,
        "tree_indices": np.zeros(1, dtype=np.int64),
        "past_length": np.zeros(1, dtype=np.int64),
        "pending_rows": np.zeros(shape.depth + 1, dtype=np.int64),
        "pending_count": np.zeros(1, dtype=np.int64),
    }
    cache = np.zeros((1, shape.kv_heads, shape.cache_rows, shape.head_dim), dtype=np.float32)
    feed |= dict.fromkeys(cache_names("past_key", "past_value", shape), cache)
    (logits,) = session.run(["logits"], feed)
    difference = float(np.abs(logits - expected).max() / max(np.abs(expected).max(), 1e-9))
    if not difference <= TOLERANCE:  # NaN fails too
        raise UserError(
            f"{type(model).__name__}: the exported graph's logits differ from transformers' by {difference:.1e}",
            "this model cannot be exported faithfully; please report its config.json",
        )
    return difference
