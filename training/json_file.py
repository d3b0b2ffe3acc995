"""Write a JSON file that appears complete or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from medusa_engine.exporter.output_file import write_file


def write_json(path: Path, document: dict[str, Any], *, indent: int | None = None) -> None:
    """Write beside `path` and put in place; a file that was there is replaced.

    Raises:
        UserError: the system refuses.
    """
    write_file(path, (json.dumps(document, indent=indent) + "\n").encode("utf-8"))
