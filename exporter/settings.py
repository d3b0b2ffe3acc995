"""What a user chooses when exporting; the defaults of `medusa-export` are these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from medusa_engine.runtime.policy import GREEDY, POLICIES

DEFAULT_MAX_LENGTH = 2048


@dataclass(frozen=True)
class ExportSettings:
    """What the user chose.

    Attributes:
        model: folder, hub id or .gguf file.
        trees: tree files; the first is the bundle's default tree.
        heads: folder, hub id or file of the heads; None where the model brings its own.
        untrained_heads: this many zero-initialised heads instead.
        output: bundle folder; None for engines/NAME.
        max_length: rows of the cache that may hold prompt and answer; None for DEFAULT_MAX_LENGTH, or the
            positions of the model if it has fewer.
        max_tree_nodes: packed rows of the largest tree, root included.
        topk: ranks each head offers.
        acceptance: policies that are chosen from at run time; greedy is always one.
        repetition_penalty: also export the graphs that penalise repetition.
        force: replace a bundle that exists.
    """

    model: str
    trees: Sequence[Path]
    heads: str | None = None
    untrained_heads: int | None = None
    output: Path | None = None
    max_length: int | None = None
    max_tree_nodes: int = 64
    topk: int = 10
    acceptance: tuple[str, ...] = (GREEDY,)
    repetition_penalty: bool = False
    force: bool = False

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies exported, greedy first, each once."""
        return tuple(policy for policy in POLICIES if policy == GREEDY or policy in self.acceptance)
