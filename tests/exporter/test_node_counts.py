"""What a layer costs in nodes as ONNX Runtime runs it: each takes microseconds, and small models have a thousand."""

from __future__ import annotations

from pathlib import Path

import pytest
from optimised_graph import OptimisedGraph
from tiny_models import Exported

# norm, product, cut into heads (3), rotations (2), cache (2 x 3), live rows (2), attention, heads joined (2), product,
# sum; norm, product, its halves, SiLU, product of both, product, sum
LAYER = 27
# embedding, norm, what picks the rows with logits (6), projection
AROUND = 9
LAYERS = 2


@pytest.mark.parametrize("name", ["step", "round"])
def test_a_layer_has_no_more_nodes_than_it_needs(own_heads: Exported, name: str, tmp_path: Path) -> None:
    counts = OptimisedGraph(own_heads.bundle / f"{name}.onnx", tmp_path).of_layers()
    nan_drafts = 0 if name == "step" else LAYERS - 1 + 3  # the last layer looks first
    assert counts.total() <= LAYERS * LAYER + AROUND + nan_drafts, counts


@pytest.mark.parametrize("name", ["step", "round"])
def test_what_every_layer_needs_is_computed_once(own_heads: Exported, name: str, tmp_path: Path) -> None:
    assert OptimisedGraph(own_heads.bundle / f"{name}.onnx", tmp_path).computed_twice() == []
