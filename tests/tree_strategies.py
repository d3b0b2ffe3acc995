"""Random trees for property tests."""

from __future__ import annotations

from hypothesis import strategies as st
from tree_invariants import prefix_closure

from medusa_engine.runtime.tree import Tree, parse_tree


@st.composite
def trees(draw: st.DrawFn, *, depth: int, topk: int, max_nodes: int, lookup: int = 0) -> Tree:
    """A prefix-closed tree that an engine of these limits takes; often small, sometimes the root alone."""
    ranks = st.integers(0, topk - 1)
    path = st.lists(ranks, min_size=1, max_size=depth)
    paths = draw(st.lists(path, max_size=max_nodes // 2)) if depth else []
    chain = [["L"] * length for length in range(1, 1 + draw(st.integers(0, lookup)))]
    return parse_tree([*map(list, prefix_closure(paths)), *chain], "a random tree").shrunk(max_nodes)
