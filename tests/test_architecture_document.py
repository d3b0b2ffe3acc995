"""The rounds that docs/architecture.md draws are those that the code runs."""

from __future__ import annotations

from documents import ROOT
from round_picture import picture

from medusa_engine.runtime.tree import parse_tree
from medusa_engine.runtime.tree_buffers import compile_tree

DOCUMENT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_picture_of_two_rounds_is_what_the_code_does() -> None:
    assert f"\n```\n{picture()}\n```\n" in DOCUMENT


def test_slots_of_lookup_nodes_are_those_of_the_text() -> None:
    tree = parse_tree([[0], ["L"], [0, 0], ["L", "L"]], "lookup")
    slots = compile_tree(tree, topk=2, depth=2).tree_indices[1:]
    assert f"TOPK = 2 the slots {', '.join(map(str, slots))}." in DOCUMENT.replace("\n", " ")
