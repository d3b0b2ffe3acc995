"""Changes to a copy of a bundle that its manifest agrees with, as if it had been exported so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from medusa_engine.runtime.manifest import document_sha256, file_sha256


def edit_manifest(bundle: Path, edit: Callable[[dict[str, Any]], object] | None = None) -> None:
    """Change the manifest, and let it list the files as they are now."""
    path = bundle / "manifest.json"
    document = json.loads(path.read_text())
    if edit is not None:
        edit(document)
    del document["sha256"]
    for name in document["files"]:
        file = bundle / name
        document["files"][name] = {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
    path.write_text(json.dumps(document | {"sha256": document_sha256(document)}))
