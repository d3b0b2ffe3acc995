"""medusa-verify explains a fault in each stage of a round: where, of which token, both logits, and how far apart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tampering import Tampered, logits_of_other_rows, path_through_a_sibling, scaled_attention
from tiny_models import Exported, Rigged

from medusa_engine.exporter.verify import verify
from medusa_engine.exporter.verify_compare import Difference
from medusa_engine.exporter.verify_settings import VerifySettings

PROMPTS = [[5, 17, 3, 9, 40, 2], [11, 12, 13]]


def first_faults(exported: Exported, bundle: Path, folder: Path, rounds: int = 20) -> list[tuple[int, Difference]]:
    """The faults of a bundle's rounds: (prompt, what differs first)."""
    prompts = folder / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    asked = VerifySettings(str(exported.checkpoint), bundle, prompts=prompts, rounds=rounds, threads=1)
    return verify(asked, lambda _: None).subjects[0].faults


@pytest.mark.parametrize(("layer", "where"), [(0, "key of layer 1 in cache row"), (1, "the cache is right")])
def test_the_scale_of_one_layer(own_heads: Exported, tmp_path: Path, layer: int, where: str) -> None:
    """Only the layers behind it have other keys and values."""
    bundle = Tampered(own_heads.bundle, tmp_path / "bundle").graph(scaled_attention(layer)).seal()
    for prompt, difference in first_faults(own_heads, bundle, tmp_path):
        assert (difference.kind, difference.round, difference.row, difference.path) == ("logits", 0, 0, ())
        assert difference.position == len(PROMPTS[prompt - 1]) - 1
        assert where in difference.reason
        ours, theirs = difference.engine_logits, difference.reference_logits
        assert ours is not None and theirs is not None and not np.allclose(ours, theirs, rtol=1e-4)
        assert difference.margin == pytest.approx(theirs[1] - theirs[0])


def test_the_rows_that_are_projected(own_heads: Exported, tmp_path: Path) -> None:
    """Of a prompt one row has logits, whose order cannot be wrong."""
    bundle = Tampered(own_heads.bundle, tmp_path / "bundle").graph(logits_of_other_rows).seal()
    faults = first_faults(own_heads, bundle, tmp_path)
    assert [prompt for prompt, _ in faults] == [1, 2]
    for prompt, difference in faults:
        assert (difference.kind, difference.round, difference.row, difference.path) == ("logits", 1, 0, ())
        assert difference.position == len(PROMPTS[prompt - 1])
        assert "wrong rows: 0, 1, 2, 3 of 4" in difference.reason


def test_the_rows_of_a_path(rigged_64: Exported, rigged_heads: Rigged, tmp_path: Path) -> None:
    """Where a draft of rank 0 is right its sibling is looked at: nothing is accepted, or no path."""
    bundle = Tampered(rigged_64.bundle, tmp_path / "bundle").graph(path_through_a_sibling).seal()
    faults = first_faults(rigged_64, bundle, tmp_path)
    assert len(faults) == 2
    for _, difference in faults:
        assert difference.kind == "acceptance" and difference.round > 0
        assert "published instead of" in difference.reason or "no path of the tree" in difference.reason
        assert difference.position >= 0 and difference.reference_logits is not None
