"""What to tell the user of an error that ONNX Runtime raised."""

from __future__ import annotations

from pathlib import Path

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.memory_errors import NO_MEMORY, ran_out_of_memory


def refusal(path: Path, problem: str, error: Exception) -> UserError:
    """The error of a graph's file: memory that ran out, or a `problem` with the first line of what was said."""
    if ran_out_of_memory(error):
        return UserError(f"{NO_MEMORY} to run it", "free memory, or export a smaller model", file=path)
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    reason = reason.replace(f"{path.parent}/", "")
    return UserError(f"{problem}: {reason}", "export the model again with medusa-export --force", file=path)
