"""An export whose rows, positions or cache are not those of transformers is refused before the bundle is in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_llama, write_tree

from medusa_engine.exporter.cli import main
from medusa_engine.exporter.round import Round


def export(model: Path, tmp_path: Path, *options: str) -> int:
    tree = write_tree(tmp_path / "tree.json", [[0]])
    arguments = ["--model", model, "--untrained-heads", "1", "--tree", tree, "-o", tmp_path / "bundle", *options]
    return main(list(map(str, arguments)))


def causal_mask(self: Round, position_ids: Any, tree_mask: torch.Tensor, live: Any, staged: Any) -> torch.Tensor:
    """Siblings see one another."""
    rows = tree_mask.shape[0]
    return (live[None] <= staged + torch.arange(rows)[:, None])[None, None]


def blind_mask(self: Round, position_ids: Any, tree_mask: torch.Tensor, live: Any, staged: Any) -> torch.Tensor:
    """The rows of earlier passes are not seen."""
    packed = live - staged
    inside = packed >= 0
    return (inside[None] & tree_mask.index_select(1, packed.clamp(min=0)))[None, None]


@pytest.mark.parametrize("mask", [causal_mask, blind_mask])
def test_wrong_mask_is_refused(
    mask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_llama(tmp_path / "model")
    monkeypatch.setattr(Round, "attention_mask", mask)
    assert export(model, tmp_path) == 1
    assert "differ from transformers'" in capsys.readouterr().err
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("length", ["1", "2", "9"])
def test_cache_too_short_for_the_whole_check_is_checked_as_far_as_it_goes(length: str, tmp_path: Path) -> None:
    assert export(save_llama(tmp_path / "model"), tmp_path, "--max-length", length) == 0
