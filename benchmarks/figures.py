"""The pictures of a report, by matplotlib: SVG for the page, PNG beside it."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter, ScalarFormatter

from medusa_engine.benchmarks.answers import OTHER
from medusa_engine.benchmarks.bench import Results
from medusa_engine.benchmarks.stage_times import BETWEEN
from medusa_engine.benchmarks.stages import STAGES
from medusa_engine.training.tree_drawing import MOST_NODES, draw

DOTS_PER_INCH = 150
SHOWN_RANKS = 16

_INK, _FAINT, _BLUE, _ORANGE, _GREEN = "#1b2733", "#6b7885", "#1f5f9e", "#c8641b", "#2f7d4f"
_COLOURS = (_BLUE, _ORANGE, _GREEN, "#7a4f9e", "#a8304a", "#5c6b1f", "#2b8a96")


def pictures(found: Results, suffix: str) -> dict[str, bytes]:
    """Name -> the picture's file.

    `speed_up`, `roofline` (T(N), with what is modelled where costs were counted), `published`, `hit_rates`, `stages`,
    and `tree_0`, `tree_1`, ... of the named trees that are not too large to be looked at.

    Args:
        suffix: `.svg` or `.png`.
    """
    drawn: dict[str, Callable[[Results], Figure]] = {
        "speed_up": _speed_up,
        "roofline": _roofline,
        "published": _published,
        **({"hit_rates": _hit_rates} if found.hits.rates else {}),
        "stages": _stages,
    }
    files = {name: _file(name, make, found, suffix) for name, make in drawn.items()}
    for index, tree in enumerate(found.trees):
        if tree.nodes <= MOST_NODES:
            files[f"tree_{index}"] = draw(tree, found.acceptance[tree.name], suffix)
    return files


def _file(name: str, make: Callable[[Results], Figure], found: Results, suffix: str) -> bytes:
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": f"medusa-bench {name}",
        "text.parse_math": False,  # names are not ours
        "font.family": "DejaVu Sans",
        "font.size": 9.5,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": _FAINT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": _FAINT,
        "ytick.color": _FAINT,
    }
    with rc_context(style):
        file = io.BytesIO()
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None} if suffix == ".svg" else None
        make(found).savefig(file, format=suffix.removeprefix("."), dpi=DOTS_PER_INCH, metadata=metadata)
    return file.getvalue()


def _speed_up(found: Results) -> Figure:
    """E[G] over T(N)/T(1) against nodes, the optimum marked."""
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.add_subplot()
    swept = found.sweep
    grown = swept.grown
    nodes = [point.tree.nodes for point in grown]
    axes.plot(nodes, [point.published.mean for point in grown], ":", color=_FAINT, label="E[G], tokens per round")
    axes.plot(nodes, [point.overhead.median for point in grown], "--", color=_ORANGE, label="T(N)/T(1), round / step")
    axes.plot(nodes, [point.speed_up for point in grown], "o-", color=_BLUE, label="speed-up, grown trees")
    named = [point for point in swept.points if not point.grown]
    axes.plot(
        [point.tree.nodes for point in named],
        [point.speed_up for point in named],
        "D",
        color=_GREEN,
        label="speed-up, named trees",
    )
    best = swept.optimum
    side = {min(nodes, default=0): "left", max(nodes, default=0): "right"}.get(best.tree.nodes, "center")
    axes.plot([best.tree.nodes], [best.speed_up], "*", color=_BLUE, markersize=17, markeredgecolor="white")
    axes.annotate(
        f"{best.tree.name}: {best.speed_up:.2f} x",
        (best.tree.nodes, best.speed_up),
        xytext=(0, 12),
        textcoords="offset points",
        ha=side,
        fontweight="bold",
        color=_BLUE,
        gid="optimum",
    )
    axes.axhline(1.0, color=_FAINT, linewidth=0.8)
    _nodes_axis(axes, [point.tree.nodes for point in swept.points])
    axes.set_ylabel("times plain decoding")
    told = max([1.0, *(max(point.published.mean, point.speed_up) for point in swept.points)])
    dearest = max(point.overhead.median for point in swept.points)
    axes.set_ylim(0, 1.15 * max(told, min(dearest, 1.6 * told)))  # what costs far more than it brings may run out of it
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=8.5)
    return figure


def _roofline(found: Results) -> Figure:
    """T(N) as timed, with its spread; T(N) as modelled, as a line of another kind."""
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.add_subplot()
    swept = found.sweep
    for chosen, mark, colour, label in (
        (swept.grown, "o-", _BLUE, "measured, grown trees"),
        ([point for point in swept.points if not point.grown], "D", _GREEN, "measured, named trees"),
    ):
        middle = [point.rounds.median for point in chosen]
        spread = [
            [value - min(point.rounds.values) for value, point in zip(middle, chosen, strict=True)],
            [max(point.rounds.values) - value for value, point in zip(middle, chosen, strict=True)],
        ]
        nodes = [point.tree.nodes for point in chosen]
        if nodes:
            axes.errorbar(nodes, middle, spread, fmt=mark, color=colour, ecolor="#c3ccd4", capsize=2, label=label)
    if found.costs is not None:
        model = found.costs.roofline
        times = [1000 * time.value for time in model.values()]
        axes.plot(list(model), times, "--", color=_ORANGE, label="modelled from counts and measured rates", gid="model")
    axes.axhline(swept.step.median, color=_FAINT, linewidth=0.8, linestyle=":", label="plain step, measured")
    _nodes_axis(axes, [point.tree.nodes for point in swept.points])
    axes.set_ylabel(f"T(N), ms at context {swept.context}")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8.5, loc="upper left")
    return figure


def _nodes_axis(axes: Any, nodes: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(nodes)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("nodes of the tree, root included")


def _published(found: Results) -> Figure:
    """Histogram of G, for each way that takes rounds."""
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = figure.add_subplot()
    ways = [way for way in found.answers.ways[1:] if way.kind != OTHER]
    width = 0.8 / len(ways)
    most = 1
    for index, way in enumerate(ways):
        tally = way.tally(found.answers.everything)
        shares = tally.distribution()
        most = max(most, *shares)
        places = [count + (index - (len(ways) - 1) / 2) * width for count in shares]
        label = f"{way.name}, mean {tally.per_round:.2f}"
        axes.bar(places, list(shares.values()), width, color=_COLOURS[index % len(_COLOURS)], label=label)
    axes.set_xticks(range(1, most + 1))
    axes.set_xlabel("tokens that a round published, G")
    axes.set_ylabel("share of the rounds")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.legend(frameon=False, fontsize=8.5)
    return figure


def _hit_rates(found: Results) -> Figure:
    """Share of positions at which each head is right at each rank."""
    rates = [row[:SHOWN_RANKS] for row in found.hits.rates]
    heads, ranks = len(rates), len(rates[0])
    figure = Figure(figsize=(max(4.0, 0.52 * ranks + 1.6), 0.5 * heads + 1.3), layout="constrained")
    axes = figure.add_subplot()
    highest = max(max(row) for row in rates) or 1.0
    shades = [[rate**0.5 for rate in row] for row in rates]  # even for the eye: most rates are small
    mesh = axes.pcolormesh(shades, cmap="Blues", vmin=0, vmax=highest**0.5, edgecolors="white", linewidth=1.5)
    mesh.set_gid("heat")
    for head, row in enumerate(rates):
        for rank, rate in enumerate(row):
            ink = "white" if rate**0.5 > 0.6 * highest**0.5 else _INK
            axes.text(rank + 0.5, head + 0.5, f"{100 * rate:.1f}", ha="center", va="center", color=ink, fontsize=8)
    axes.set_xticks([rank + 0.5 for rank in range(ranks)], [str(rank) for rank in range(ranks)])
    axes.set_yticks([head + 0.5 for head in range(heads)], [f"head {head}" for head in range(heads)])
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.set_xlabel("rank (percent of the positions)")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def _stages(found: Results) -> Figure:
    """Mean milliseconds by stage, a bar for each kind of pass."""
    figure = Figure(figsize=(7.2, 0.55 * len(found.stages) + 1.5), layout="constrained")
    axes = figure.add_subplot()
    names = [times.title for times in found.stages]
    left = [0.0] * len(names)
    for stage, colour in zip((*STAGES, BETWEEN), _COLOURS, strict=True):
        widths = [sum(times.stage(stage)) / len(times.passes) for times in found.stages]
        axes.barh(names, widths, left=left, color=colour, label=stage, height=0.6)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(f"ms per pass at context {found.sweep.context}, profiler on")
    axes.tick_params(axis="y", length=0, labelcolor=_INK)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8.5)
    return figure
