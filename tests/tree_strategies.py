"""Random trees for property tests."""

from __future__ import annotations

from hypothesis import strategies as st
from tree_invariants import prefix_closure

from medusa_engine.runtime.tree import Tree, parse_tree


@st.composite
def trees(draw: st.DrawFn, *, depth: int, topk: int, max_nodes: int) -> Tree:
    """A prefix-closed tree that an engine of these limits takes; often small, sometimes the root alone."""
    ranks = st.integers(0, topk - 1)
    paths = draw(st.lists(st.lists(ranks, min_size=1, max_size=depth), max_size=max_nodes // 2))
    return parse_tree([list(path) for path in prefix_closure(paths)], "a random tree").shrunk(max_nodes)
