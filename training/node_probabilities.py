"""How probable it is that a node of a tree is accepted: from the tree's file, or from a calibration."""

from __future__ import annotations

from pathlib import Path

from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.strict_json import read_json
from medusa_engine.runtime.tree import MAX_TREE_BYTES, MOST_LOOKUP, Tree, TreePath, path_of, tree_file
from medusa_engine.training.calibration import Calibration
from medusa_engine.training.tree_search import node_acceptance, path_mass

_HINT = 'write "probabilities" as one number from 0 to 1 for each entry of "paths", in their order'


def probabilities_of_file(path: Path) -> dict[TreePath, float] | None:
    """What a tree file that `load_tree` has read says of its nodes; None if it says nothing.

    Raises:
        UserError: they are not one number from 0 to 1 for each path.
    """
    document = read_json(tree_file(path), max_bytes=MAX_TREE_BYTES, hint=_HINT)
    values = document.get("probabilities") if isinstance(document, dict) else None
    if not isinstance(document, dict) or values is None:
        return None
    paths = [path_of(entry) for entry in document["paths"]]
    if not isinstance(values, list) or len(values) != len(paths):
        raise UserError(f"{path}: there is not one probability for each of the {counted(len(paths), 'path')}", _HINT)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
            raise UserError(f"{path}: one of the probabilities is not a number from 0 to 1", _HINT)
    return dict(zip(paths, map(float, values), strict=True))


def calibrated_probabilities(tree: Tree, calibration: Calibration, counts: str) -> dict[TreePath, float]:
    """What a calibration says of a tree's nodes; E[G] is 1 + their sum.

    Of a tree with lookup nodes, whose tokens may be the heads' too, the answers are replayed: a node's share of the
    rounds that accept it, where each accepts one path.

    Raises:
        UserError: the tree is deeper or has larger ranks than what was calibrated, or lookup nodes that were not.
    """
    if tree.heads > calibration.heads or tree.widest_rank >= calibration.topk:
        raise UserError(
            f"tree {tree.name} has depth {tree.heads} and ranks to {tree.widest_rank}, but the calibration has"
            f" {counted(calibration.heads, 'head')} and ranks to {calibration.topk - 1}",
            "give the calibration of an engine that runs this tree",
        )
    if not tree.lookup:
        mass = path_mass(counts, calibration.ranks, calibration.topk)
        return {path: mass(path) for path in tree.paths}
    if calibration.lookup is None:
        raise UserError(
            f"tree {tree.name} has lookup nodes, but the calibration was written without lookup",
            "calibrate again: medusa-tree calibrate",
        )
    if tree.lookup > MOST_LOOKUP:
        raise UserError(
            f"tree {tree.name} has {counted(tree.lookup, 'lookup node')}: engines offer at most {MOST_LOOKUP}",
            "use a tree with fewer",
        )
    return node_acceptance(tree, calibration.sequences)
