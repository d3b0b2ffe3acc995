"""Whether a plan runs here: on this library, and on this GPU."""

from __future__ import annotations

import re
from pathlib import Path

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.plan import Plan, build_command


def check_library(path: Path, plan: Plan, *, module: str, version: str) -> None:
    """Refuse a plan that another version of the library built.

    A version-compatible plan runs on every later version of the same major one; others on the very version alone.

    Args:
        module: that would deserialise it.
        version: its `__version__`.

    Raises:
        UserError: names both versions, and the commands that mend it.
    """
    if version == plan.library_version:
        return
    built, here = _numbers(plan.library_version), _numbers(version)
    if plan.version_compatible and built[:1] == here[:1] and built <= here:
        return
    raise UserError(
        f"{path}: built by {plan.flavor} {plan.library_version}, but {module} here is {version}",
        f"install that version, or build the plan again with this one: {build_command(path, plan)}",
    )


def check_device(path: Path, plan: Plan, *, compute_capability: str, device: str) -> None:
    """Refuse a plan that was built for other GPUs.

    Raises:
        UserError: names both capabilities, and the command that builds for this GPU.
    """
    if compute_capability != plan.compute_capability:
        raise UserError(
            f"{path}: built for compute capability {plan.compute_capability}, but {device} has {compute_capability}",
            f"build it for this GPU: {build_command(path, plan, compute_capability=compute_capability)}",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", version))
