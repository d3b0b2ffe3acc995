from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from host_kernel import HostKernel, Launch, Report

from medusa_engine.plugins.compact_append_kv import kernel
from medusa_engine.plugins.compact_append_kv.reference import compact_append_kv
from medusa_engine.plugins.nvrtc import compile_ptx

Bits = npt.NDArray[Any]

# Rows are moved, never read as numbers: random bits, NaNs included, stand for every type of their width.
ITEM = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
HEAD_DIMS = (1, 3, 8, 16, 20, 64, 80, 96, 128, 256)


def random_bits(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Bits:
    item = ITEM[dtype]
    return random.integers(0, np.iinfo(item).max, shape, item, endpoint=True)


@dataclass(frozen=True)
class Case:
    """A call that fits: past and new are keys and values."""

    past: tuple[Bits, Bits]
    new: tuple[Bits, Bits]
    past_length: int
    rows: npt.NDArray[np.int64]
    count: int
    launch: Launch
    seed: int
    shift: int

    @staticmethod
    def draw(seed: int) -> Case:
        random = np.random.default_rng(seed)
        dtype = str(random.choice(list(ITEM)))
        heads, head_dim = int(random.integers(1, 4)), int(random.choice(HEAD_DIMS))
        large = seed % 20 == 0  # the sizes of a round: up to 65 slots, 64 rows
        slots, new_rows = (int(random.integers(1, n + 1)) for n in ((65, 64) if large else (6, 9)))
        past_length, count = int(random.integers(0, 20)), int(random.integers(0, slots + 1))
        needed = past_length + count + new_rows  # often exactly as many rows as fit
        cache_rows = max(needed, past_length + slots) + int(random.choice([0, 0, 1, 7]))
        staged = cache_rows - past_length  # pending rows may lie anywhere behind P
        rows = {
            "anywhere": lambda: random.integers(0, staged, slots),
            "a path": lambda: np.sort(random.permutation(staged)[:slots]),
            "in place": lambda: np.arange(slots),
            "reversed": lambda: np.arange(slots)[::-1],  # every row is the source of another
            "rotated": lambda: np.roll(np.arange(slots), 1),
            "one row": lambda: np.full(slots, random.integers(staged)),
            "some in place": lambda: np.where(random.random(slots) < 0.5, np.arange(slots), staged - 1),
        }[str(random.choice(["anywhere", "a path", "in place", "reversed", "rotated", "one row", "some in place"]))]()
        past, new = (
            tuple(random_bits(random, (1, heads, n, head_dim), dtype) for _ in range(2)) for n in (cache_rows, new_rows)
        )
        threads = kernel.THREADS if seed % 40 == 0 else int(random.choice([1, 2, 3, 7, 16, 33]))
        # TensorRT's addresses are multiples of 64; others take narrower accesses.
        shift = int(random.choice([0, 0, 0, 4, 8, 16]))
        launch = Launch.of(past[0], new[0], slots, threads)
        return Case(past, new, past_length, rows.astype(np.int64), count, launch, seed, shift)

    @property
    def bytes_moved(self) -> int:
        """The rows that move and the appended rows, of keys and values."""
        moving = sum(int(row) != slot for slot, row in enumerate(self.rows[: self.count]))
        row_bytes = self.past[0].shape[3] * self.past[0].itemsize
        return 2 * self.past[0].shape[1] * (moving + self.new[0].shape[2]) * row_bytes

    def run(self, run: HostKernel) -> tuple[tuple[Bits, Bits], Report]:
        state = self.past_length, self.rows, self.count
        return run(self.past, self.new, *state, launch=self.launch, seed=self.seed, shift=self.shift)

    def expected(self) -> list[Bits]:
        state = self.past_length, self.rows, self.count
        return [compact_append_kv(past, new, *state) for past, new in zip(self.past, self.new, strict=True)]


def is_right(case: Case, run: HostKernel) -> bool:
    """Whether every bit of both caches is the reference's."""
    present, _ = case.run(run)
    return all(np.array_equal(after, right) for after, right in zip(present, case.expected(), strict=True))


@pytest.mark.parametrize("first", range(0, 4000, 500))
def test_every_bit_is_the_references_in_every_order_of_threads(host_kernel: HostKernel, first: int) -> None:
    for seed in range(first, first + 500):
        case = Case.draw(seed)
        present, report = case.run(host_kernel)
        for after, right in zip(present, case.expected(), strict=True):
            np.testing.assert_array_equal(after, right, err_msg=f"seed {seed}")
        assert not report.faults, (seed, report.faults)
        assert report.bytes_read == report.bytes_written == case.bytes_moved, seed


def test_the_order_of_threads_changes_nothing(host_kernel: HostKernel) -> None:
    case = Case.draw(40)
    for seed in range(50):
        state = case.past_length, case.rows, case.count
        present, _ = host_kernel(case.past, case.new, *state, launch=case.launch, seed=seed)
        for after, right in zip(present, case.expected(), strict=True):
            np.testing.assert_array_equal(after, right)


@pytest.mark.parametrize("dtype", ITEM)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_rows_of_real_models_move_in_16_byte_accesses(host_kernel: HostKernel, dtype: str, head_dim: int) -> None:
    random = np.random.default_rng(0)
    past, new = (tuple(random_bits(random, (1, 2, rows, head_dim), dtype) for _ in range(2)) for rows in (20, 6))
    _, report = host_kernel(past, new, 5, np.array([0, 2, 6]), 3)
    assert report.narrow == 0
    assert report.bytes_written == 2 * 2 * (2 + 6) * head_dim * past[0].itemsize  # row 0 stays where it is


@pytest.mark.parametrize("count", [-3, 0, 2, 99])
@pytest.mark.parametrize("past_length", [-(2**40), -4, 0, 9, 19, 20, 2**40])
def test_no_byte_outside_the_cache_is_touched_whatever_the_state_says(
    host_kernel: HostKernel, past_length: int, count: int
) -> None:
    random = np.random.default_rng(0)
    past, new = (tuple(random_bits(random, (1, 2, rows, 8), "float16") for _ in range(2)) for rows in (20, 6))
    for rows in ([0, 3, 1], [-1, -(2**40), 2**40], [19, 20, 30]):
        present, report = host_kernel(past, new, past_length, np.array(rows), count)
        assert not report.faults
        for after, before in zip(present, past, strict=True):
            committed = min(max(past_length, 0), 20)
            np.testing.assert_array_equal(after[:, :, :committed], before[:, :, :committed])


def test_a_call_that_does_not_fit_writes_the_rows_that_do(host_kernel: HostKernel) -> None:
    random = np.random.default_rng(0)
    past, new = (tuple(random_bits(random, (1, 2, rows, 8), "float16") for _ in range(2)) for rows in (20, 6))
    present, _ = host_kernel(past, new, 15, np.array([0, 2]), 2)
    np.testing.assert_array_equal(present[0][:, :, 15:17], past[0][:, :, [15, 17]])
    np.testing.assert_array_equal(present[0][:, :, 17:], new[0][:, :, :3])


# Kernels that these checks must tell from the right one, made of its source

BARRIER = "    __syncthreads();\n"
APPEND = "    const long long first"


def changed(old: str, new: str) -> str:
    source = kernel.source()
    assert source.count(old) == 1
    return source.replace(old, new)


def appending_first() -> str:
    """The new rows are written before the pending rows are read."""
    source = kernel.source()
    start, end = source.index(APPEND), source.index("}\n\n// past_*")
    append = source[start:end]
    at = source.index("    for (int i = threadIdx.x; i < s.pending_count")
    return source[:at] + append + BARRIER + source[at:start] + source[end:]


@pytest.mark.parametrize("fault", ["no barrier", "appends before it reads"])
def test_a_racy_kernel_fails(fault: str, tmp_path: Path) -> None:
    racy = HostKernel(changed(BARRIER, "") if fault == "no barrier" else appending_first(), tmp_path)
    cases = [Case.draw(seed) for seed in range(200)]
    assert sum(not is_right(case, racy) for case in cases) > 20


def test_a_race_is_reported_in_every_order_of_threads_harmful_or_not(tmp_path: Path) -> None:
    racy = HostKernel(changed(BARRIER, ""), tmp_path)
    random = np.random.default_rng(0)
    past, new = (tuple(random_bits(random, (1, 1, rows, 8), "float16") for _ in range(2)) for rows in (8, 2))
    state = 2, np.array([2, 0]), 1  # thread 0 reads row 4, thread 1 writes it
    launch, right = Launch.of(past[0], new[0], 2, threads=2), compact_append_kv(past[0], new[0], *state)
    outcomes = set()
    for seed in range(40):
        present, report = racy(past, new, *state, launch=launch, seed=seed)
        outcomes.add(np.array_equal(present[0], right))
        assert report.races > 0
    assert outcomes == {True, False}


def test_moving_rows_that_are_in_place_fails(tmp_path: Path) -> None:
    wasteful = HostKernel(changed("s.pending_rows[slot] != slot && ", ""), tmp_path)
    cases = [Case.draw(seed) for seed in range(50)]
    assert all(is_right(case, wasteful) for case in cases)
    assert any(case.run(wasteful)[1].bytes_written > case.bytes_moved for case in cases)


@pytest.mark.parametrize("guard", ["in_cache(source) && ", " && in_cache(s.past_length + slot)", "row >= 0 && "])
def test_a_kernel_without_one_of_its_guards_fails(guard: str, tmp_path: Path) -> None:
    unguarded = HostKernel(changed(guard, ""), tmp_path)
    past = new = (np.zeros((1, 1, 8, 8), np.uint16),) * 2
    states = [(-2, [3, 3, 3], 3), (6, [0, 3, 1], 3), (5, [0, 0, 0, 0, 0, 0, 0], 7)]
    reports = [unguarded(past, new, P, np.array(rows), G)[1] for P, rows, G in states]
    assert any("stray" in report.faults for report in reports)


# PTX


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "12.0", "12.1"])
def test_the_kernel_compiles_to_ptx_for_every_device(capability: str) -> None:
    ptx = compile_ptx(kernel.source(), "compact_append_kv.cu", capability)
    assert f".visible .entry {kernel.ENTRY}(" in ptx
    assert f".target sm_{capability.replace('.', '')}" in ptx
    assert "ld.global.cg.v4.u32" in ptx and "st.global.cg.v4.u32" in ptx
    assert ".local" not in ptx  # nothing spills to device memory


def test_the_source_and_the_launch_agree_on_the_slice() -> None:
    assert f"constexpr int kSliceBytes = {kernel.SLICE_BYTES};" in kernel.source()
    assert f"__launch_bounds__({kernel.THREADS})" in kernel.source()
