"""Bundles whose weights have NaN in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx

from medusa_engine.runtime.manifest import document_sha256, file_sha256

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def with_nan_row(source: Path, target: Path, weight: str, row: int) -> Path:
    """A copy of a bundle with NaN in one row of one weight, as if it had been exported so."""
    shutil.copytree(source, target)
    graph = onnx.load(target / "round.onnx", load_external_data=False).graph
    (tensor,) = (tensor for tensor in graph.initializer if tensor.name.endswith(weight))
    (offset,) = (int(entry.value) for entry in tensor.external_data if entry.key == "offset")
    weights = np.memmap(target / "weights.bin", np.float32, "r+", offset, tuple(tensor.dims))
    weights[row] = np.nan
    weights.flush()
    path = target / "manifest.json"
    document = json.loads(path.read_text())
    document["files"]["weights.bin"]["sha256"] = file_sha256(target / "weights.bin")
    del document["sha256"]
    path.write_text(json.dumps(document | {"sha256": document_sha256(document)}))
    return target
