"""The compaction kernel on the device: against its reference, and its bytes over time against a large copy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from medusa_engine.plugins.compact_append_kv import kernel
from medusa_engine.plugins.compact_append_kv.reference import compact_append_kv

TRIALS = 200


class Kernel:
    """The kernel, compiled for the device at hand and launched on torch's current stream.

    Raises:
        RuntimeError: no way to compile or to launch it was found; says which were tried.
    """

    def __init__(self) -> None:
        major, minor = torch.cuda.get_device_capability()
        self._driver, self.how = _load(f"{major}.{minor}")

    def __call__(
        self,
        past_key: torch.Tensor,
        past_value: torch.Tensor,
        new_key: torch.Tensor,
        new_value: torch.Tensor,
        past_length: torch.Tensor,
        pending_rows: torch.Tensor,
        pending_count: torch.Tensor,
    ) -> None:
        _, heads, cache_rows, head_dim = past_key.shape
        row_bytes = head_dim * past_key.element_size()
        slots = pending_rows.shape[0]
        tensors = (past_key, past_value, new_key, new_value, past_length, pending_rows, pending_count)
        self._driver(
            kernel.grid(heads, row_bytes),
            kernel.shared_bytes(slots),
            [tensor.data_ptr() for tensor in tensors],
            kernel.scalars(cache_rows, new_key.shape[2], row_bytes, slots),
            [past_key.data_ptr(), past_value.data_ptr()],
        )


def check(compact: Kernel) -> dict[str, Any]:
    """Random sizes against the numpy reference, bit by bit; the bytes that move, and how fast.

    Raises:
        AssertionError: a byte differs.
    """
    random = np.random.default_rng(0)
    for _ in range(TRIALS):
        _compare(compact, random)
    return {"compiled_by": compact.how, "cases_equal_to_reference": TRIALS, **_bandwidth(compact)}


def _compare(compact: Kernel, random: np.random.Generator) -> None:
    heads, head_dim = int(random.integers(1, 9)), int(random.choice([8, 64, 80, 96, 128, 256]))
    slots, rows = int(random.integers(1, 7)), int(random.integers(1, 65))
    count = int(random.integers(0, slots + 1))
    past_length = int(random.integers(0, 200))
    dtype = random.choice([np.float16, np.float32])
    cache_rows = past_length + 64 + slots + rows
    pending = np.sort(random.choice(64, slots, replace=False)).astype(np.int64)
    state = [np.array([past_length]), pending, np.array([count])]
    past = [random.standard_normal((1, heads, cache_rows, head_dim)).astype(dtype) for _ in range(2)]
    new = [random.standard_normal((1, heads, rows, head_dim)).astype(dtype) for _ in range(2)]
    on_device = [torch.from_numpy(array).cuda() for array in (*past, *new, *state)]
    compact(*on_device)
    for kind in range(2):
        expected = compact_append_kv(past[kind], new[kind], past_length, pending, count)
        assert np.array_equal(on_device[kind].cpu().numpy(), expected), (heads, head_dim, slots, rows, count, dtype)


def _bandwidth(compact: Kernel) -> dict[str, float]:
    """Of one large append (every source row read, every target row written), and of a copy of the same bytes."""
    heads, head_dim, rows = 32, 128, 4096
    past = [torch.zeros(1, heads, 3 * rows, head_dim, dtype=torch.float16, device="cuda") for _ in range(2)]
    new = [torch.ones(1, heads, rows, head_dim, dtype=torch.float16, device="cuda") for _ in range(2)]
    state = [torch.tensor(values, device="cuda") for values in ([16], [0, 2, 3, 5, 7], [5])]
    moved_rows = 4 + rows
    moved = 2 * 2 * heads * moved_rows * head_dim * 2  # keys and values, read and written
    small = [tensor[:, :, :64].contiguous() for tensor in new]
    large = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(large)
    return {
        "append_4096_rows_gb_per_s": moved / _seconds(lambda: compact(*past, *new, *state)) / 1e9,
        "round_of_64_rows_us": _seconds(lambda: compact(*past, *small, *state)) * 1e6,
        "copy_gb_per_s": copy_bandwidth(large, target) / 1e9,
    }


def copy_bandwidth(source: torch.Tensor, target: torch.Tensor) -> float:
    """Bytes per second of a device-to-device copy, read and written counted."""
    return 2 * source.numel() * source.element_size() / _seconds(lambda: target.copy_(source))


def _seconds(work: Any, repeats: int = 20) -> float:
    """Median time of one call on the device."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return float(np.median(times))


def _load(capability: str) -> tuple[Any, str]:
    tried = []
    for load in (_load_with_bindings, _load_with_cupy):
        try:
            return load(capability), load.__name__.removeprefix("_load_with_")
        except Exception as error:  # noqa: BLE001 - whatever is missing, the next way is tried, and all are named
            tried.append(f"{load.__name__.removeprefix('_load_with_')}: {type(error).__name__}: {error}")
    raise RuntimeError("; ".join(tried))


def _load_with_bindings(capability: str) -> Any:
    from cuda.bindings import driver

    from medusa_engine.plugins.nvrtc import compile_ptx

    def checked(result: tuple[Any, ...]) -> Any:
        if int(result[0]):
            raise RuntimeError(str(result[0]))
        return result[1] if len(result) > 1 else None

    torch.cuda.current_stream()  # makes the context
    module = checked(driver.cuModuleLoadData(compile_ptx(kernel.source(), kernel.ENTRY, capability).encode()))
    function = checked(driver.cuModuleGetFunction(module, kernel.ENTRY.encode()))

    def launch(grid: Any, shared: int, inputs: list[int], scalars: Any, outputs: list[int]) -> None:
        values = [np.array([v], np.uint64) for v in inputs] + [np.array([v], np.int32) for v in scalars]
        values += [np.array([v], np.uint64) for v in outputs]
        pointers = np.array([value.ctypes.data for value in values], dtype=np.uint64)
        stream = torch.cuda.current_stream().cuda_stream
        checked(driver.cuLaunchKernel(function, *grid, kernel.THREADS, 1, 1, shared, stream, pointers.ctypes.data, 0))

    return launch


def _load_with_cupy(_capability: str) -> Any:
    import cupy

    function = cupy.RawModule(code=kernel.source(), options=("--std=c++17",)).get_function(kernel.ENTRY)

    def launch(grid: Any, shared: int, inputs: list[int], scalars: Any, outputs: list[int]) -> None:
        arguments = [
            *(np.uint64(v) for v in inputs),
            *(np.int32(v) for v in scalars),
            *(np.uint64(v) for v in outputs),
        ]
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            function(grid, (kernel.THREADS,), tuple(arguments), shared_mem=shared)

    return launch
