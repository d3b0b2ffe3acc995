"""What the documents point to is there, and the README's picture is of the tree it speaks of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import DOCUMENTS, ROOT, name_of

from medusa_engine.runtime.tree import load_tree
from medusa_engine.training.node_probabilities import probabilities_of_file
from medusa_engine.training.tree_sketch import headline


def text_of(path: Path) -> str:
    """The document without its code blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)


def links(path: Path) -> Iterator[tuple[str, str]]:
    """Target and anchor of every link that stays in the repository."""
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(path)):
        if not link.startswith(("http://", "https://")):
            target, _, anchor = link.partition("#")
            yield target, anchor


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", text_of(path), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for target, anchor in links(path):
        file = (path.parent / target).resolve() if target else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(f"{target}#{anchor}")
    assert broken == []


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {target for target, _ in links(ROOT / "README.md")}
    assert [page.name for page in ROOT.glob("docs/*.md") if f"docs/{page.name}" not in linked] == []


def test_picture_of_the_readme_is_of_the_demos_tree() -> None:
    """`medusa-tree show smollm2 -o docs/images/tree.svg` draws it anew."""
    tree = ROOT / "trees" / "smollm2.json"
    title = headline(load_tree(tree), probabilities_of_file(tree))
    assert title in (ROOT / "docs" / "images" / "tree.svg").read_text(encoding="utf-8")
