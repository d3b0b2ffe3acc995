"""compact_append_kv.cu compiled as host C++ (plugins/cuda_host.h), called through ctypes."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from medusa_engine.plugins.compact_append_kv import kernel

HEADERS = Path(__file__).parent / "plugins"
GUARD = 64  # bytes before and behind every buffer
GUARD_BYTE = 0xC3

Bits = npt.NDArray[Any]


class Report(ctypes.Structure):
    """What the emulation saw, over all threads of a launch."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "bytes_read",
            "bytes_written",
            "narrow",
            "stray",
            "misaligned",
            "races",
            "divergent",
            "shared_overrun",
        )
    ]

    @property
    def faults(self) -> dict[str, int]:
        names = ("stray", "misaligned", "races", "divergent", "shared_overrun")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


class Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("past_key", "past_value", "new_key", "new_value")),
        *((name, ctypes.c_void_p) for name in ("past_length", "pending_rows", "pending_count")),
        *((name, ctypes.c_int) for name in ("cache_rows", "new_rows", "row_bytes", "slots")),
        *((name, ctypes.c_void_p) for name in ("present_key", "present_value")),
    ]


@dataclass(frozen=True)
class Launch:
    """How the kernel is launched."""

    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    scalars: tuple[int, ...]

    @staticmethod
    def of(past: Bits, new: Bits, slots: int, threads: int = kernel.THREADS) -> Launch:
        row_bytes = past.shape[3] * past.itemsize
        return Launch(
            kernel.grid(past.shape[1], row_bytes),
            threads,
            kernel.shared_bytes(slots),
            kernel.scalars(past.shape[2], new.shape[2], row_bytes, slots),
        )


class GuardedBuffer:
    """A copy of an array with guard bytes around it, shifted from a 64-byte boundary by `shift` bytes."""

    def __init__(self, array: Bits, shift: int = 0) -> None:
        memory = np.full(array.nbytes + 2 * GUARD + 64 + shift, GUARD_BYTE, np.uint8)
        self._start = -memory.ctypes.data % 64 + GUARD + shift
        self._memory = memory
        self._end = self._start + array.nbytes
        self.array: Bits = memory[self._start : self._end].view(array.dtype).reshape(array.shape)
        self.array[:] = array

    @property
    def address(self) -> int:
        return self._memory.ctypes.data + self._start

    @property
    def intact(self) -> bool:
        return bool(
            (self._memory[: self._start] == GUARD_BYTE).all() and (self._memory[self._end :] == GUARD_BYTE).all()
        )


class HostKernel:
    """A variant of the kernel.

    Args:
        source: CUDA C++.
        folder: empty, for the files of the compiler.
    """

    def __init__(self, source: str, folder: Path) -> None:
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            pytest.skip("needs a C++ compiler")
        file, library = folder / "kernel.cu", folder / "kernel.so"
        file.write_text(source)
        command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC"]
        command += [f"-I{HEADERS}", f'-DKERNEL="{file}"', str(HEADERS / "compact_append_kv_host.cpp")]
        subprocess.run([*command, "-o", str(library)], check=True)
        self._run = ctypes.CDLL(str(library)).run
        self._run.restype = None

    def __call__(
        self,
        past: tuple[Bits, Bits],
        new: tuple[Bits, Bits],
        past_length: int,
        pending_rows: npt.NDArray[np.int64],
        pending_count: int,
        *,
        launch: Launch | None = None,
        seed: int = 0,
        shift: int = 0,
    ) -> tuple[tuple[Bits, Bits], Report]:
        """Run the kernel in place on copies of keys and values; return them and the report.

        Args:
            launch: kernel.py's by default.
            seed: of the order of threads and blocks.
            shift: bytes between the start of keys, values and new rows and a 64-byte boundary.
        """
        launch = launch or Launch.of(past[0], new[0], len(pending_rows))
        caches = [GuardedBuffer(array, shift) for array in past]
        rows = [GuardedBuffer(array, shift) for array in new]
        state = [GuardedBuffer(np.array(v, np.int64)) for v in ([past_length], pending_rows, [pending_count])]
        pointers = [buffer.address for buffer in (*caches, *rows, *state)]
        arguments = Arguments(*pointers, *launch.scalars, *pointers[:2])
        report = Report()
        self._run(
            ctypes.byref(arguments),
            past[0].shape[1],
            (ctypes.c_uint * 3)(*launch.grid),
            launch.threads,
            launch.shared_bytes,
            ctypes.c_uint(seed),
            ctypes.byref(report),
        )
        assert all(buffer.intact for buffer in (*caches, *rows, *state)), "bytes around a buffer were written"
        assert all((buffer.array == array).all() for buffer, array in zip(rows, new, strict=True))
        return (caches[0].array, caches[1].array), report
