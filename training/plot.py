"""Draw how training went: losses on the left, accuracies on the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Curve:
    """Points of one line; `dotted` lines share the colour of the one before."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    dotted: bool = False


def draw_training(
    path: Path, losses: Sequence[Curve], accuracies: Sequence[Curve], *, x_label: str, title: str
) -> None:
    """Write a picture.

    Args:
        path: .png file.
        losses, accuracies: lines of the two panels.
        x_label: of both.
        title: what the accuracies are over.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"text.parse_math": False}):  # names are not ours
        figure = Figure(figsize=(10, 4), layout="tight")
        panels = zip(figure.subplots(1, 2), (losses, accuracies), strict=True)
        for axes, curves in panels:
            colour = None
            for curve in curves:
                style = {"color": colour, "alpha": 0.6, "linestyle": ":"} if curve.dotted else {}
                (line,) = axes.plot(
                    curve.x, curve.y, marker="." if len(curve.x) < 30 else None, label=curve.label, **style
                )
                colour = line.get_color()
            axes.set(xlabel=x_label, title="Loss" if curves is losses else f"{title} (dotted: top-5)")
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
            if curves is accuracies:
                axes.set_ylim(0, 1)
        figure.savefig(path, dpi=120)
