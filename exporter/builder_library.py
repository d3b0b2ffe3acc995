"""The library that builds a plan: TensorRT or TensorRT-RTX, one module of one API, chosen once."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from medusa_engine.plugins.compact_append_kv.tensorrt_plugin import supports_plugins
from medusa_engine.runtime.cuda import open_cuda
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.plan import FLAVORS, TENSORRT, TENSORRT_RTX

_MODULES = {TENSORRT: "tensorrt", TENSORRT_RTX: "tensorrt_rtx"}
_LABELS = {TENSORRT: "TensorRT", TENSORRT_RTX: "TensorRT-RTX"}


@dataclass(frozen=True)
class Library:
    """The chosen module and what it can do.

    Attributes:
        flavor: one of `plan.FLAVORS`.
        module: `tensorrt` or `tensorrt_rtx`.
    """

    flavor: str
    module: Any

    @property
    def version(self) -> str:
        return str(self.module.__version__)

    @property
    def label(self) -> str:
        """Name and version, as messages call it."""
        return f"{_LABELS[self.flavor]} {self.version}"

    @property
    def has_plugins(self) -> bool:
        return supports_plugins(self.module)

    @property
    def has_timing_caches(self) -> bool:
        """TensorRT-RTX has the calls, but since 1.2 they do nothing."""
        return self.flavor == TENSORRT

    @property
    def has_lean_runtime(self) -> bool:
        """A version-compatible build looks for it; TensorRT-RTX comes without."""
        return self.flavor == TENSORRT

    @property
    def capabilities(self) -> dict[str, Any]:
        """Compute capability -> the library's name of it, of those it builds for without such a GPU."""
        names = getattr(self.module, "ComputeCapability", None)
        numbers = {} if names is None else names.__members__
        numbers = {name[2:]: member for name, member in numbers.items() if re.fullmatch(r"SM[0-9]{2,3}", name)}
        return {f"{name[:-1]}.{name[-1]}": member for name, member in numbers.items()}


def load_library(flavor: str | None) -> Library:
    """The library of a flavor; None for the first of FLAVORS that is installed.

    Raises:
        UserError: it is not installed, or does not load.
    """
    installed = [name for name in FLAVORS if find_spec(_MODULES[name]) is not None]
    if flavor is None and not installed:
        raise UserError("neither TensorRT nor TensorRT-RTX is installed", _install(TENSORRT_RTX))
    flavor = flavor or installed[0]
    if flavor not in installed:
        raise UserError(f"the package {_MODULES[flavor]} is not installed", _install(flavor))
    try:
        module = importlib.import_module(_MODULES[flavor])
    except (ImportError, OSError, RuntimeError) as error:  # its shared libraries
        raise UserError(f"the package {_MODULES[flavor]} does not load: {error}", _install(flavor)) from error
    if not hasattr(module, "Builder"):
        raise UserError(f"the package {_MODULES[flavor]} cannot build: it has no Builder", _install(flavor))
    return Library(flavor, module)


def choose_capability(library: Library, wanted: str | None, gpu: str | None) -> str:
    """The compute capability to build for.

    Args:
        wanted: what the user asked for; None for that of the GPU here.
        gpu: compute capability of the GPU here; None without one.

    Raises:
        UserError: the library does not build for it, or it is not known.
    """
    known = library.capabilities
    some = f"--compute-capability, of {', '.join(known)}" if known else "no --compute-capability"
    if wanted is None:
        if gpu is not None:
            return gpu
        hint = f"give {some}" if known else "build where the GPU is, or with --flavor tensorrt-rtx"
        raise UserError("there is no GPU here whose compute capability could be taken", hint)
    if not re.fullmatch(r"[1-9][0-9]?\.[0-9]", wanted):
        raise UserError(f"--compute-capability {wanted!r} is not like 8.9", f"give {some}")
    if wanted not in known and wanted != gpu:
        if known:
            raise UserError(f"{library.label} does not build for compute capability {wanted}", f"give {some}")
        here = f"{library.label} builds for the GPU here alone"
        has = "there is none" if gpu is None else f"it has compute capability {gpu}"
        raise UserError(
            f"--compute-capability {wanted}: {here}, and {has}",
            "build where such a GPU is, or with --flavor tensorrt-rtx",
        )
    return wanted


def gpu_capability() -> str | None:
    """Compute capability of the GPU here; None without one, or without its driver or cuda-bindings."""
    try:
        return open_cuda().compute_capability
    except UserError:
        return None


def _install(flavor: str) -> str:
    return f"install what this command needs: pip install '.[{flavor}]' in a clone of medusa-engine"
