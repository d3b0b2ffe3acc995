"""CUDA C++ to PTX through NVRTC: needs no GPU, no driver and no CUDA toolkit, only two Python packages."""

from __future__ import annotations

import importlib
import re
from typing import Any

from medusa_engine.runtime.errors import UserError

INSTALL_HINT = "install them: python -m pip install cuda-bindings nvidia-cuda-nvrtc"


def compile_ptx(source: str, name: str, compute_capability: str) -> str:
    """Compile a CUDA C++ source to PTX for one compute capability.

    Args:
        source: CUDA C++.
        name: of the source, for messages.
        compute_capability: of the device that shall run it, as "8.9"; later ones run it too.

    Raises:
        UserError: cuda-bindings or NVRTC is not installed, NVRTC does not know the capability,
            or the source does not compile.
    """
    nvrtc = _nvrtc()
    known = [f"{arch // 10}.{arch % 10}" for arch in _checked(nvrtc, nvrtc.nvrtcGetSupportedArchs())]
    if not re.fullmatch(r"\d+\.\d", compute_capability) or compute_capability not in known:
        raise UserError(
            f"NVRTC does not compile for compute capability {compute_capability!r}",
            f"use one of {', '.join(known)} (a newer nvidia-cuda-nvrtc may know more)",
        )
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
    try:
        options = [f"--gpu-architecture=compute_{compute_capability.replace('.', '')}".encode(), b"--std=c++17"]
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise UserError(
                f"NVRTC refuses {name} for compute capability {compute_capability}: {_log(nvrtc, program)}",
                "install the nvidia-cuda-nvrtc release named in requirements.lock, or report this log",
            )
        ptx = bytes(_checked(nvrtc, nvrtc.nvrtcGetPTXSize(program)))
        _checked(nvrtc, nvrtc.nvrtcGetPTX(program, ptx))
        return ptx.rstrip(b"\0").decode()
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def nvrtc_version() -> str:
    """Return the CUDA version of NVRTC, as "13.5": a device needs a driver of this or a later one.

    Raises:
        UserError: cuda-bindings or NVRTC is not installed.
    """
    nvrtc = _nvrtc()
    major, minor = _checked(nvrtc, nvrtc.nvrtcVersion())
    return f"{major}.{minor}"


def _nvrtc() -> Any:
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise UserError(f"the CUDA kernel cannot be compiled without cuda-bindings: {error}", INSTALL_HINT) from error
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the library behind the bindings is looked for at the first call
        reason = str(error).splitlines()[0]
        raise UserError(f"the CUDA kernel cannot be compiled without NVRTC: {reason}", INSTALL_HINT) from error
    return nvrtc


def _checked(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    """The values behind the status of an NVRTC call."""
    status, *values = answer
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC failed: {status.name}")
    return values[0] if len(values) == 1 else values


def _log(nvrtc: Any, program: Any) -> str:
    """The compiler's messages in one line."""
    log = bytes(_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
    _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
    return "; ".join(line.strip() for line in log.rstrip(b"\0").decode().splitlines() if line.strip())
