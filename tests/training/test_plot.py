"""The picture of a training run."""

from __future__ import annotations

from pathlib import Path

from medusa_engine.training.plot import Curve, draw_training


def test_names_are_no_formulas(tmp_path: Path) -> None:
    curve = Curve("loss $x^{$", [0, 1], [2, 1])
    draw_training(tmp_path / "out.png", [curve], [curve], x_label="step $x^{$", title="Accuracy $x^{$")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
