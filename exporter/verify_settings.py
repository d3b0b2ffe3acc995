"""What `medusa-verify` is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Shares of a row's largest logit. What rounding makes of two correct implementations stays below; a wrong row,
# position or weight is off by more.
_TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


@dataclass(frozen=True)
class VerifySettings:
    """Options of `medusa-verify`.

    Attributes:
        model: folder, hub id or .gguf file of the checkpoint.
        engine: bundle folder, or plan.
        heads: of the checkpoint, where it does not bring its own.
        plan: a plan to compare, too.
        trees: verified in turn, round by round; none for those of the bundle.
        prompts: file, see `verify_prompts.py`; None for a few of our own.
        chat: apply the chat template to texts.
        rounds: of each prompt, at most.
        tolerance: None for the default of the engine's dtype.
        threads: of ONNX Runtime.
    """

    model: str
    engine: Path
    heads: str | None = None
    plan: Path | None = None
    trees: tuple[Path, ...] = ()
    prompts: Path | None = None
    chat: bool = False
    rounds: int = 32
    tolerance: float | None = None
    threads: int = 0


def default_tolerance(dtype: str) -> float:
    """For an engine whose weights and cache are of this dtype."""
    return _TOLERANCES.get(dtype, max(_TOLERANCES.values()))
