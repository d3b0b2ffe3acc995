"""A message or report that counts things says `1 node`, not `1 nodes`: such counts go through `counted`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from documents import ROOT
from error_messages import FOLDERS

from medusa_engine.runtime.counted import counted

THINGS = (
    "answers|conversations|cores|heads|labels|layers|nodes|paths|positions|prompts|ranks|rounds|rows|samples|shards"
    "|steps|threads|tokens|trees|ways"
)
COUNT = "\0"  # a value that is written as it is
# Behind `to` and `/` stands the end of a range; a word may lie between count and thing, as in `3 lookup nodes`.
PLURAL = re.compile(rf"(?<!\bto )(?<!/){COUNT} (?:(?!and )[a-z-]+ )?(?:{THINGS})\b(?!/)")
NO_COUNTS = {
    ("benchmarks/bench_overheads.py", "\0 rows"),  # of two caches
    ("benchmarks/text.py", "\0 positions"),  # a list of counts
    ("exporter/head_checkpoint.py", "\0 heads"),  # of a format
    ("training/features.py", "\0 positions"),  # of a kind
    ("training/searched_tree.py", "\0 nodes"),  # always several
}


def texts(tree: ast.AST) -> Iterator[str]:
    """The f-strings but those of errors that no user sees; COUNT for values that may be counts, # for others."""
    hidden = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
        if node.exc.func.id in {"ValueError", "RuntimeError"}
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and id(node) not in hidden:
            yield "".join(map(written, node.values))


def written(part: ast.expr) -> str:
    match part:
        case ast.Constant(value=str(text)):
            return text
        case ast.FormattedValue(format_spec=None, value=ast.Name(id=name)) if not name.isupper():
            return COUNT
        case ast.FormattedValue(format_spec=None, value=ast.Attribute() | ast.Subscript() | ast.BinOp()):
            return COUNT
        case ast.FormattedValue(format_spec=None, value=ast.Call(func=ast.Name(id="len" | "sum"))):
            return COUNT
    return "#"


def test_counted_things_have_a_singular() -> None:
    told = [counted(count, "lookup node") for count in (0, 1, 2)]
    assert told == ["0 lookup nodes", "1 lookup node", "2 lookup nodes"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_count_is_written_before_a_plural(folder: str) -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), plural[0])
        for path in (ROOT / folder).rglob("*.py")
        for text in texts(ast.parse(path.read_text(encoding="utf-8")))
        for plural in PLURAL.finditer(text)
    }
    assert sorted(found - NO_COUNTS) == []
