"""Medusa trees: read a path set and check it against an engine.

A path is the tuple of head ranks from the root to a node: `(2, 0)` is the best token of head 1 below the
third-best token of head 0. A lookup node, `"L"` in a file and `LOOKUP` here, holds a token that the context itself
proposes: `(LOOKUP, LOOKUP)` is the second token behind the earlier occurrence of what was written last. Lookup nodes
stand behind the root or one another. A tree is a prefix-closed set of paths; the root is implicit. Packed row 0 is the
root and packed row `1 + i` is path `i` in canonical order, which sorts by (length, path), lookup behind every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.strict_json import read_json, shown

MAX_TREE_BYTES = 1 << 20
SHIPPED_TREES = Path(__file__).parents[1] / "trees"
RANK_LIMIT = 1 << 31
LOOKUP = RANK_LIMIT  # stands in a path where others have a rank, and sorts behind them all
LOOKUP_TEXT = "L"  # in files
MOST_LOOKUP = 64  # that an engine offers
PLAIN_NAME, ADAPTIVE_NAME = RESERVED_NAMES = ("plain", "adaptive")  # ways to decode, beside trees in tables
METADATA_KEYS = ("description", "source", "heads", "topk", "probabilities", "metadata")
ACCEPTED_KEYS = ("paths", "name", *METADATA_KEYS)

_SHOWN_RANKS = 8
_FORMAT_HINT = 'write the tree as {"paths": [[0], [1], [0, 0]]} or as the list of paths alone'
_WITHOUT_HEADS = "of lookup nodes alone, such as lookup_2 or lookup_4 of trees/"
_LOOKUP_HINT = 'lookup nodes follow the root or one another: ["L"], ["L", "L"]'

TreePath = tuple[int, ...]


@dataclass(frozen=True)
class Tree:
    """A prefix-closed set of draft paths in canonical order, root excluded.

    Args:
        paths: distinct non-empty paths sorted by (length, path); empty for the tree of one row.
        name: what reports and errors call the tree.
        metadata: the file's other keys (`METADATA_KEYS`) as written; never interpreted.

    Raises:
        ValueError: the paths are not canonical or not prefix-closed. `parse_tree` sorts and explains.
    """

    paths: tuple[TreePath, ...]
    name: str = "tree"
    metadata: dict[str, object] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        known: set[TreePath] = {()}
        previous: TreePath = ()
        for path in self.paths:
            if (len(path), path) <= (len(previous), previous):
                raise ValueError(f"paths are not in canonical order at {_path_text(path)}")
            if path[:-1] not in known or path[-1] < 0 or is_mixed(path):
                raise ValueError(f"parent or rank of {_path_text(path)} is not valid")
            known.add(path)
            previous = path

    @property
    def nodes(self) -> int:
        """Packed rows N, root included."""
        return 1 + len(self.paths)

    @property
    def depth(self) -> int:
        """Edges on the longest path; 0 for the root alone."""
        return len(self.paths[-1]) if self.paths else 0

    @property
    def heads(self) -> int:
        """How many heads the tree uses: edges on the longest path of ranks."""
        return max((len(path) for path in self.paths if LOOKUP not in path), default=0)

    @property
    def lookup(self) -> int:
        """Lookup nodes, which are a chain."""
        return sum(LOOKUP in path for path in self.paths)

    @property
    def widest_rank(self) -> int:
        """Largest rank of any path; -1 where there is none."""
        return max((path[-1] for path in self.paths if LOOKUP not in path), default=-1)

    def document(self) -> list[list[int | str]]:
        """The paths as a file has them."""
        return [entry_of(path) for path in self.paths]

    @property
    def sizes(self) -> str:
        """For people: `6 nodes, 2 heads, 3 lookup nodes`."""
        parts = [(self.nodes, "node", True), (self.heads, "head", not self.lookup), (self.lookup, "lookup node", False)]
        return ", ".join(counted(count, what) for count, what, always in parts if count or always)

    def shrunk(self, rows: int) -> Tree:
        """The tree of the first `rows` packed rows, prefix-closed because shorter paths come first.

        Args:
            rows: packed rows to keep, root included; at least 1.

        Returns:
            This tree if it has no more than `rows`; else a smaller one without metadata, which
            describes the whole tree.

        Raises:
            ValueError: `rows` is below 1.
        """
        if rows < 1:
            raise ValueError(f"a tree keeps at least 1 row, not {rows}")
        if rows >= self.nodes:
            return self
        return Tree(self.paths[: rows - 1], f"{self.name}[:{rows}]")


def step_text(step: int) -> str:
    """An entry of a path for people: its rank, or L."""
    return LOOKUP_TEXT if step == LOOKUP else str(step)


def path_of(entry: Iterable[int | str]) -> TreePath:
    """The path of an entry of a tree file, which is not checked."""
    return tuple(LOOKUP if step == LOOKUP_TEXT else int(step) for step in entry)


def entry_of(path: TreePath) -> list[int | str]:
    """The entry of a tree file for a path."""
    return [LOOKUP_TEXT if step == LOOKUP else step for step in path]


def is_mixed(path: TreePath) -> bool:
    """Whether a path has both ranks and lookup nodes, which no tree may."""
    return LOOKUP in path and path.count(LOOKUP) < len(path)


def chain(depth: int) -> Tree:
    """The tree of one path of rank 0, of `depth` edges."""
    return Tree(tuple((0,) * length for length in range(1, depth + 1)), "chain")


def load_tree(path: Path) -> Tree:
    """Read a tree file: UTF-8 JSON of at most `MAX_TREE_BYTES`, in the form `parse_tree` accepts.

    The plain name of a shipped tree, `8` or `8.json`, will do where there is no file of that name. NaN, Infinity and
    repeated object keys are refused. A file that gives no name is called by its stem.

    Raises:
        UserError: the file cannot be read, is not strict JSON, or is not a tree; names the file, and
            line and column of a JSON error.
    """
    path = tree_file(path)
    tree = parse_tree(read_json(path, max_bytes=MAX_TREE_BYTES, hint=_FORMAT_HINT), str(path))
    if tree.name in RESERVED_NAMES:
        raise UserError(f"{path}: the tree is called {tree.name}, as a way to decode is", 'give it another "name"')
    return tree


def tree_file(path: Path) -> Path:
    """The file that `load_tree` reads: `path`, or the shipped tree of that name if `path` is only a name."""
    if len(path.parts) == 1 and not path.exists():
        shipped = SHIPPED_TREES / f"{path.name.removesuffix('.json')}.json"
        if shipped.is_file():
            return shipped
    return path


def parse_tree(document: object, source: str) -> Tree:
    """Build a tree from a list of paths, or from an object with `paths` and any of `ACCEPTED_KEYS`.

    Paths may come in any order. The tree is called by `name`, else by the last part of `source`
    without `.json`.

    Args:
        document: decoded JSON.
        source: where it came from (a file name), named in every error.

    Raises:
        UserError: unknown key, an entry that is no path of integer ranks in 0 … 2**31 - 1 or of "L" alone, a path
            given twice, or one whose prefix is missing; names the entry and its value.
    """
    name = PurePath(source).name.removesuffix(".json")
    if not name or not name.isprintable():
        name = "tree"
    metadata: dict[str, object] = {}
    entries = document
    if isinstance(document, dict):
        for key in document:
            if key not in ACCEPTED_KEYS:
                raise UserError(
                    f"{source}: unknown top-level key {shown(key)}",
                    f"accepted keys are {', '.join(ACCEPTED_KEYS)}",
                )
        if "paths" not in document:
            raise UserError(f'{source}: the key "paths" is missing', _FORMAT_HINT)
        entries = document["paths"]
        metadata = {key: document[key] for key in METADATA_KEYS if key in document}
        if "name" in document:
            name = document["name"]
            if not isinstance(name, str) or not name or not name.isprintable():
                raise UserError(f"{source}: name {shown(name)} is not a line of text", "give the tree a printable name")
    if not isinstance(entries, (list, tuple)):
        raise UserError(f"{source}: the paths are not a list but {shown(entries)}", _FORMAT_HINT)
    seen: dict[TreePath, int] = {}
    for index, entry in enumerate(entries):
        path = _parse_path(entry, f"{source}: entry {index}")
        if path in seen:
            raise UserError(
                f"{source}: path {_path_text(path)} is given twice, as entries {seen[path]} and {index}",
                "list every path once",
            )
        seen[path] = index
    _check_prefixes(seen, source)
    return Tree(tuple(sorted(seen, key=lambda path: (len(path), path))), name, metadata)


def check_tree(tree: Tree, *, heads: int, topk: int, max_tree_nodes: int, lookup: int = 0) -> None:
    """Refuse a tree that an engine cannot run.

    Args:
        heads: Medusa heads of the engine; paths of ranks may be that long.
        topk: candidates the engine keeps per head; ranks run from 0 to topk - 1.
        max_tree_nodes: packed rows a round of the engine may have, root included.
        lookup: lookup nodes the engine offers.

    Raises:
        UserError: names the tree's value, the engine's limit and the export option that raises it.
    """
    if tree.heads > heads:
        fitting = f"whose paths have at most {counted(heads, 'rank')}" if heads else _WITHOUT_HEADS
        raise UserError(
            f"tree {tree.name} has depth {tree.heads}, but the engine has {counted(heads, 'head')}",
            f"use a tree {fitting}, or export a checkpoint with "
            f"{counted(tree.heads, 'head')} (medusa-export --heads or --untrained-heads)",
        )
    if tree.lookup > lookup:
        offered, fewer = (f"offers {lookup}", "fewer") if lookup else ("was exported without lookup", "none")
        raise UserError(
            f"tree {tree.name} has {counted(tree.lookup, 'lookup node')}, but the engine {offered}",
            f"use a tree with {fewer}, or export with medusa-export --lookup-depth {tree.lookup}"
            if tree.lookup <= MOST_LOOKUP
            else f"use a tree with {fewer}: engines offer at most {MOST_LOOKUP}",
        )
    if tree.widest_rank >= topk:
        raise UserError(
            f"tree {tree.name} uses rank {tree.widest_rank}, but the engine keeps ranks 0 to {topk - 1}",
            f"use a tree of smaller ranks, or export with medusa-export --top-k {tree.widest_rank + 1}",
        )
    if tree.nodes > max_tree_nodes:
        raise UserError(
            f"tree {tree.name} has {counted(tree.nodes, 'node')} with the root, but the engine allows {max_tree_nodes}",
            f"use a smaller tree, or export with medusa-export --max-tree-nodes {tree.nodes}",
        )


def _parse_path(entry: object, where: str) -> TreePath:
    if not isinstance(entry, (list, tuple)):
        raise UserError(f"{where} is not a list of ranks: {shown(entry)}", _FORMAT_HINT)
    if not entry:
        raise UserError(f"{where} is an empty path (the root is implicit)", "remove the empty path")
    if LOOKUP_TEXT in entry:
        path = tuple(LOOKUP if step == LOOKUP_TEXT else step for step in entry)
        if is_mixed(path):
            raise UserError(f"{where} mixes lookup nodes with others", _LOOKUP_HINT)
        return path
    for rank in entry:
        if isinstance(rank, str):
            raise UserError(
                f"{where} holds the string rank {shown(rank)}", 'write ranks as bare integers, lookup nodes as "L"'
            )
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise UserError(f"{where} holds {shown(rank)}, which is not an integer rank", _FORMAT_HINT)
        if rank < 0:
            raise UserError(f"{where} holds the negative rank {shown(rank)}", "ranks count from 0")
        if rank >= RANK_LIMIT:
            raise UserError(f"{where}: rank {shown(rank)} does not fit", f"ranks are below {RANK_LIMIT}")
    return tuple(entry)


def _check_prefixes(paths: Iterable[TreePath], source: str) -> None:
    known = {(), *paths}
    for path in paths:
        if path[:-1] in known:
            continue
        missing = next(path[:length] for length in range(1, len(path)) if path[:length] not in known)
        word = "parent" if len(missing) == len(path) - 1 else "prefix"
        raise UserError(
            f"{source}: {word} {_path_text(missing)} of {_path_text(path)} is missing",
            f"list every prefix of a path as a path of its own: add {_path_text(missing)}",
        )


def _path_text(path: TreePath) -> str:
    ranks = ", ".join(shown(LOOKUP_TEXT if rank == LOOKUP else rank) for rank in path[:_SHOWN_RANKS])
    return f"[{ranks}]" if len(path) <= _SHOWN_RANKS else f"[{ranks}, … {counted(len(path), 'rank')}]"
