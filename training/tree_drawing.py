"""A tree as a picture: a layer for each depth, the root on top, nodes coloured by their probability."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from typing import Any

from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.tree import Tree, TreePath, step_text
from medusa_engine.training.tree_sketch import headline, percent

FORMATS = (".svg", ".png")
MOST_NODES = 512
DOTS_PER_INCH = 150

# Inches
_COLUMN, _LAYER = 0.5, 0.95
_BOX_WIDTH, _BOX_HEIGHT = 0.42, 0.36
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.95, 0.3, 0.75, 0.35
_LEAST_WIDTH = 5.0
_LETTER = 0.11  # of the title

_INK, _FAINT, _EDGE, _PLAIN = "#1b2733", "#6b7885", "#9aa7b4", "#e9eef3"


def layout(tree: Tree) -> dict[TreePath, tuple[float, int]]:
    """Column (from 0) and depth of every node, the root () included.

    Siblings stand in the order of their ranks, a parent over the middle of its children, and subtrees as close as
    nodes of one layer, a column apart, allow.
    """
    children: dict[TreePath, list[TreePath]] = {}
    for path in tree.paths:
        children.setdefault(path[:-1], []).append(path)
    shift: dict[TreePath, float] = {(): 0.0}  # from the parent
    outline: dict[TreePath, tuple[list[float], list[float]]] = {}  # leftmost, rightmost of each layer, from the node
    for path in (*reversed(tree.paths), ()):  # children before their parents
        left: list[float] = []
        right: list[float] = []
        for child in children.get(path, []):
            child_left, child_right = outline.pop(child)
            shift[child] = max((r - c + 1.0 for r, c in zip(right, child_left, strict=False)), default=0.0)
            left += [shift[child] + edge for edge in child_left[len(left) :]]
            right[: len(child_right)] = [shift[child] + edge for edge in child_right]
        middle = (shift[children[path][0]] + shift[children[path][-1]]) / 2 if path in children else 0.0
        for child in children.get(path, []):
            shift[child] -= middle
        outline[path] = ([0.0, *(edge - middle for edge in left)], [0.0, *(edge - middle for edge in right)])
    columns = {(): -min(outline[()][0])}
    for path in tree.paths:
        columns[path] = columns[path[:-1]] + shift[path]
    return {path: (column, len(path)) for path, column in columns.items()}


def draw(tree: Tree, probabilities: Mapping[TreePath, float] | None, suffix: str) -> bytes:
    """The picture's file.

    Args:
        probabilities: of every path; None draws without them.
        suffix: one of FORMATS. In an SVG the nodes have the ids node-root, node-0, node-0-1, node-L, ...

    Raises:
        UserError: the tree is too large to be looked at, or matplotlib is not installed.
    """
    if tree.nodes > MOST_NODES:
        raise UserError(
            f"tree {tree.name} has {counted(tree.nodes, 'node')}: a picture shows at most {MOST_NODES}",
            "leave --output out: the sketch in the terminal has no such limit",
        )
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UserError(
            f"the package {error.name} is not installed",
            "install what drawing needs: pip install '.[train]' in a clone of medusa-engine",
        ) from error

    places, title = layout(tree), headline(tree, probabilities)
    least = max(_LEAST_WIDTH, 2 * _RIGHT + _LETTER * len(title))
    width = max(least, _LEFT + _RIGHT + _COLUMN * (1 + max(column for column, _ in places.values())))
    height = _TOP + _BOTTOM + _LAYER * tree.depth + _BOX_HEIGHT
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "medusa-tree",
        "text.parse_math": False,  # names are not ours
        "font.family": "DejaVu Sans",
    }
    with matplotlib.rc_context(style), warnings.catch_warnings():
        figure = Figure(figsize=(width, height), facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(0, height))
        axes.axis("off")
        inches = _inches(places, width, height)
        _draw_layers(axes, tree, title, width, height)
        _draw_edges(axes, tree, inches, probabilities)
        for path in ((), *tree.paths):
            _draw_node(axes, path, inches[path], probabilities)
        file = io.BytesIO()
        metadata = {"Date": None} if suffix == ".svg" else None
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # a character of the name that the font lacks
        figure.savefig(file, format=suffix.removeprefix("."), dpi=DOTS_PER_INCH, metadata=metadata)
    return file.getvalue()


def _inches(
    places: Mapping[TreePath, tuple[float, int]], width: float, height: float
) -> dict[TreePath, tuple[float, float]]:
    """Middle of every node, from the lower left corner; the tree is centred between the margins."""
    used = _COLUMN * max(column for column, _ in places.values())
    left = _LEFT + (width - _LEFT - _RIGHT - used) / 2
    top = height - _TOP - _BOX_HEIGHT / 2
    return {path: (left + _COLUMN * column, top - _LAYER * depth) for path, (column, depth) in places.items()}


def _draw_layers(axes: Any, tree: Tree, title: str, width: float, height: float) -> None:
    axes.text(0.3, height - 0.38, title, color=_INK, fontsize=11, fontweight="bold", va="center")
    top = height - _TOP - _BOX_HEIGHT / 2
    for depth in range(tree.depth + 1):
        y = top - _LAYER * depth
        axes.text(0.3, y, _layer_name(tree, depth), color=_FAINT, fontsize=8.5, va="center")
        axes.plot((_LEFT - 0.1, width - 0.1), (y, y), color="#eef1f4", linewidth=0.8, zorder=0)


def _layer_name(tree: Tree, depth: int) -> str:
    if depth == 0:
        return "root"
    return f"head {depth - 1}" if depth <= tree.heads else f"lookup {depth}"


def _draw_edges(
    axes: Any,
    tree: Tree,
    inches: Mapping[TreePath, tuple[float, float]],
    probabilities: Mapping[TreePath, float] | None,
) -> None:
    for path in tree.paths:
        (x0, y0), (x1, y1) = inches[path[:-1]], inches[path]
        y0, y1 = y0 - _BOX_HEIGHT / 2, y1 + _BOX_HEIGHT / 2
        # Leave the parent and reach the child upright.
        steps = [i / 16 for i in range(17)]
        xs = [x0 + (x1 - x0) * t * t * (3 - 2 * t) for t in steps]
        ys = [y0 + (y1 - y0) * t for t in steps]
        weight = 0.9 if probabilities is None else 0.6 + 3.4 * probabilities[path]
        axes.plot(xs, ys, color=_EDGE, linewidth=weight, solid_capstyle="round", zorder=1)


def _draw_node(
    axes: Any, path: TreePath, place: tuple[float, float], probabilities: Mapping[TreePath, float] | None
) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y = place
    fill, ink = _PLAIN, _INK
    if probabilities is not None:
        fill, ink = _colours(probabilities[path] if path else 1.0)
    box = FancyBboxPatch(
        (x - _BOX_WIDTH / 2, y - _BOX_HEIGHT / 2),
        _BOX_WIDTH,
        _BOX_HEIGHT,
        boxstyle="round,pad=0,rounding_size=0.09",
        facecolor=fill,
        edgecolor=_FAINT,
        linewidth=0.7,
        zorder=2,
        gid="node-" + ("-".join(map(step_text, path)) if path else "root"),
    )
    axes.add_patch(box)
    rank = step_text(path[-1]) if path else "root"
    if probabilities is None or not path:
        axes.text(x, y, rank, color=ink, fontsize=9, ha="center", va="center_baseline", zorder=3)
        return
    axes.text(x, y + 0.065, rank, color=ink, fontsize=9, fontweight="bold", ha="center", va="center", zorder=3)
    axes.text(x, y - 0.085, percent(probabilities[path]), color=ink, fontsize=6.5, ha="center", va="center", zorder=3)


def _colours(probability: float) -> tuple[tuple[float, float, float], str]:
    """Fill and ink: from nearly white to dark blue, even for the eye in the square root, for most nodes are rare."""
    light, dark = (0.955, 0.97, 0.985), (0.06, 0.30, 0.55)
    share = probability**0.5
    fill = tuple(a + (b - a) * share for a, b in zip(light, dark, strict=True))
    return (fill[0], fill[1], fill[2]), "white" if share > 0.55 else _INK
