"""The documents of the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "[a-z]*/README.md", "heads/*/*.md", "engines/recipes/*.md")
    for path in ROOT.glob(pattern)
)


def name_of(path: Path) -> str:
    """The path within the repository, for the id of a test."""
    return path.relative_to(ROOT).as_posix()
