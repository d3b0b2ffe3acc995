"""What a user chooses when building a plan; the defaults of `medusa-build` are these."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.policy import GREEDY

MOST_PREFILL_CHUNK = 512
_SUFFIX = ".plan"  # medusa-run tells plans by it
_MOST_WORKSPACE_MIB = 1 << 20


@dataclass(frozen=True)
class BuildSettings:
    """What the user chose.

    Attributes:
        bundle: folder of a bundle exported for TensorRT.
        output: NAME.plan; None for the bundle's path with that suffix.
        flavor: one of `plan.FLAVORS`; None for whichever is installed, the full library first.
        compute_capability: of the GPUs the plan is for, "8.9"; None for that of the GPU here.
        acceptance: policy whose graph becomes the plan.
        workspace_mib: scratch memory that the builder's kernels may use, MiB; None leaves it to the library.
        timing_cache: file of kernel timings, read if it exists, and written after the build.
        version_compatible: build for later versions of the library too.
        max_prefill_chunk: rows of the largest prompt chunk.
        plugin: use the compaction plugin where the library has plugins.
        verbose: print all that the library says.
        force: replace a plan that exists.
    """

    bundle: Path
    output: Path | None = None
    flavor: str | None = None
    compute_capability: str | None = None
    acceptance: str = GREEDY
    workspace_mib: int | None = None
    timing_cache: Path | None = None
    version_compatible: bool = False
    max_prefill_chunk: int = MOST_PREFILL_CHUNK
    plugin: bool = True
    verbose: bool = False
    force: bool = False

    @property
    def plan_path(self) -> Path:
        """Where the plan goes."""
        if self.output is not None:
            return self.output
        bundle = self.bundle if self.bundle.name not in ("", "..") else self.bundle.resolve()
        return bundle.with_name(f"{bundle.name}{_SUFFIX}")

    def check(self) -> None:
        """Refuse values out of range.

        Raises:
            UserError: names the option.
        """
        sizes = {"--max-prefill-chunk": (self.max_prefill_chunk, MOST_PREFILL_CHUNK)}
        if self.workspace_mib is not None:
            sizes["--workspace-mib"] = (self.workspace_mib, _MOST_WORKSPACE_MIB)
        for option, (value, most) in sizes.items():
            if not 1 <= value <= most:
                raise UserError(f"{option} is {value}", f"give a number from 1 to {most}")
        if self.plan_path.suffix != _SUFFIX or self.plan_path.name == _SUFFIX:
            raise UserError(f"{self.plan_path}: a plan's name ends in {_SUFFIX}", "give --output NAME.plan")
