"""What a user chooses when exporting; the defaults of `medusa-export` are these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import LARGEST_LIMIT, ONNXRUNTIME, TARGET_DTYPES, TENSORRT
from medusa_engine.runtime.policy import GREEDY, POLICIES, REJECTION
from medusa_engine.runtime.strict_json import shown
from medusa_engine.runtime.tree import MOST_LOOKUP

DEFAULT_MAX_LENGTH = 2048
DEFAULT_LOOKUP = 4
MOST_UNTRAINED_HEADS = 64  # each has hidden x hidden weights; published checkpoints have 2 to 5 heads
MOST_RANKS = {TENSORRT: 3840}  # k of its TopK
INT8, INT4 = "int8", "int4"
BITS = {INT8: 8, INT4: 4}  # of weight matrices; everything else is fp32
# as users call them -> dtype of the cache and of what is computed with
PRECISIONS = {"fp32": "float32", INT8: "float32", INT4: "float32", "fp16": "float16", "bf16": "bfloat16"}

_MOST = {"--untrained-heads": MOST_UNTRAINED_HEADS, "--lookup-depth": MOST_LOOKUP}


@dataclass(frozen=True)
class ExportSettings:
    """What the user chose.

    Attributes:
        model: folder, hub id or .gguf file.
        trees: tree files; the first is the bundle's default tree.
        heads: folder, hub id or file of the heads; None where the model brings its own.
        untrained_heads: this many zero-initialised heads instead.
        no_heads: export no heads: lookup alone proposes.
        lookup: whether trees may have lookup nodes.
        lookup_depth: how many; None for as many as there are heads, DEFAULT_LOOKUP without.
        output: bundle folder; None for engines/NAME.
        max_length: rows of the cache that may hold prompt and answer; None for DEFAULT_MAX_LENGTH, or the
            positions of the model if it has fewer.
        max_tree_nodes: packed rows of the largest tree, root included.
        topk: ranks each head offers.
        acceptance: policies that are chosen from at run time; greedy is always one.
        repetition_penalty: also export the graphs that penalise repetition.
        target: what will run the graphs, of TARGET_DTYPES.
        precision: of PRECISIONS; None for the first that the target has.
        force: replace a bundle that exists.
    """

    model: str
    trees: Sequence[Path]
    heads: str | None = None
    untrained_heads: int | None = None
    no_heads: bool = False
    lookup: bool = True
    lookup_depth: int | None = None
    output: Path | None = None
    max_length: int | None = None
    max_tree_nodes: int = 64
    topk: int = 10
    acceptance: tuple[str, ...] = (GREEDY,)
    repetition_penalty: bool = False
    target: str = ONNXRUNTIME
    precision: str | None = None
    force: bool = False

    def lookup_nodes(self, heads: int) -> int:
        """Lookup nodes that an export with so many heads offers."""
        if not self.lookup:
            return 0
        return self.lookup_depth or heads or DEFAULT_LOOKUP

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies exported, greedy first, each once."""
        return tuple(policy for policy in POLICIES if policy == GREEDY or policy in self.acceptance)

    @property
    def dtype(self) -> str:
        """Of the cache and of what is computed with, as the manifest says it."""
        return TARGET_DTYPES[self.target][0] if self.precision is None else PRECISIONS[self.precision]

    @property
    def weights(self) -> str:
        """Of the weight matrices, as the manifest says it."""
        return self.precision if self.precision in BITS else self.dtype


def check_settings(settings: ExportSettings) -> None:
    """Refuse values that are out of range, and those that do not go together.

    Raises:
        UserError: names the options.
    """
    sizes = {"--max-tree-nodes": settings.max_tree_nodes, "--top-k": settings.topk}
    if settings.max_length is not None:
        sizes["--max-length"] = settings.max_length
    if settings.untrained_heads is not None:
        sizes["--untrained-heads"] = settings.untrained_heads
    if settings.lookup_depth is not None:
        sizes["--lookup-depth"] = settings.lookup_depth
        if not settings.lookup:
            raise UserError("--lookup-depth and --no-lookup are given together", "give one of them")
    for option, value in sizes.items():
        most = _MOST.get(option, LARGEST_LIMIT - 1)
        if not 1 <= value <= most:
            raise UserError(f"{option} is {value}", f"give a number from 1 to {most}")
    for policy in settings.acceptance:
        if policy not in POLICIES:
            raise UserError(f"--acceptance: there is no policy {shown(policy)}", f"give some of {','.join(POLICIES)}")
    if settings.heads and settings.untrained_heads:
        raise UserError("--heads and --untrained-heads are given together", "give one of them")
    if settings.no_heads:
        _check_no_heads(settings)
    _check_target(settings)


def _check_no_heads(settings: ExportSettings) -> None:
    for option, given in (("--heads", settings.heads), ("--untrained-heads", settings.untrained_heads)):
        if given:
            raise UserError(f"{option} and --no-heads are given together", "give one of them")
    if not settings.lookup:
        raise UserError("--no-heads and --no-lookup are given together: nothing would propose", "give one of them")
    if REJECTION in settings.acceptance:
        raise UserError(
            f"--no-heads has no --acceptance {REJECTION}, whose drafts the heads draw", "give sample, which is as exact"
        )


def _check_target(settings: ExportSettings) -> None:
    for option, value, known in (
        ("target", settings.target, TARGET_DTYPES),
        ("precision", settings.precision, PRECISIONS),
    ):
        if value is not None and value not in known:
            raise UserError(f"--{option} is {shown(value)}", f"give one of {', '.join(known)}")
    target = f"--target {settings.target}"
    dtypes = TARGET_DTYPES[settings.target]
    if settings.dtype not in dtypes:
        its = [name for name, dtype in PRECISIONS.items() if dtype in dtypes]
        other = next(name for name, dtypes in TARGET_DTYPES.items() if settings.dtype in dtypes)
        raise UserError(
            f"{target} has no --precision {settings.precision}",
            f"give --precision {' or '.join(its)}, or --target {other}",
        )
    if settings.target != TENSORRT:
        return
    if REJECTION in settings.acceptance:
        raise UserError(f"{target} has no --acceptance {REJECTION}", "give sample or typical, or --target onnxruntime")
    if settings.repetition_penalty:
        raise UserError(f"{target} has no --repetition-penalty", "leave it out, or give --target onnxruntime")
    most = MOST_RANKS[TENSORRT]
    if settings.topk > most:
        raise UserError(f"--top-k is {settings.topk}, too many for {target}", f"give at most {most}")
