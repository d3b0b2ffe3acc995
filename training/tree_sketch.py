"""A tree as lines of text: one node a line, its rank, its probability and a bar."""

from __future__ import annotations

from collections.abc import Mapping

from medusa_engine.runtime.tree import Tree, TreePath, step_text

BAR_CELLS = 24

_NAME = 32  # characters shown


def sketch(tree: Tree, probabilities: Mapping[TreePath, float] | None) -> str:
    """The tree for a terminal, children indented below their parent.

    Args:
        probabilities: of every path; None draws without them.
    """
    lines = [headline(tree, probabilities), "root"]
    last_of = {path[:-1]: path for path in tree.paths}  # canonical order: the last child comes last
    width = max((4 * len(path) + len(step_text(path[-1])) for path in tree.paths), default=0)
    for path in sorted(tree.paths):  # depth first
        stem = "".join("    " if last_of[path[: i - 1]] == path[:i] else "│   " for i in range(1, len(path)))
        line = f"{stem}{'└── ' if last_of[path[:-1]] == path else '├── '}{step_text(path[-1])}"
        if probabilities is not None:
            bar = "█" * round(BAR_CELLS * probabilities[path])
            line = f"{line:{width}}  {percent(probabilities[path]):>6}  {bar}".rstrip()
        lines.append(line)
    return "\n".join(lines)


def headline(tree: Tree, probabilities: Mapping[TreePath, float] | None) -> str:
    """Name and sizes of a tree, and what it is expected to publish."""
    name = tree.name if len(tree.name) <= _NAME else f"{tree.name[: _NAME - 1]}…"
    line = f"{name}: {tree.sizes}"
    return line if probabilities is None else f"{line}, E[G] {1.0 + sum(probabilities.values()):.2f}"


def percent(probability: float) -> str:
    """At most five characters: 55%, 5.5%, 0.03%, 0%."""
    value = 100 * probability
    if value >= 9.95 or value == 0.0:
        return f"{value:.0f}%"
    if value >= 0.095:
        return f"{value:.1f}%"
    return f"{value:.2f}%" if value >= 0.005 else "<.01%"
