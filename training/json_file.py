"""Write a JSON file that appears complete or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, document: dict[str, Any], *, indent: int | None = None) -> None:
    """Write beside `path` and put in place; a file that was there is replaced."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(document, indent=indent) + "\n", encoding="utf-8")
    partial.replace(path)
