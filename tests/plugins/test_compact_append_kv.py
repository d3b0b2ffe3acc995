from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
from compaction_model import KINDS, one_node_model
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from medusa_engine.plugins.compact_append_kv.reference import compact_append_kv

ORACLES: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "oracles" / "worked_examples.json").read_text()
)
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Move = Callable[[Floats, Floats, int, Ints, int], Floats]


def feed(past: Floats, new: Floats, past_length: int, rows: Ints, count: int) -> dict[str, npt.NDArray[Any]]:
    """Inputs of the model; the values are the negated keys, so that a swap of the two is seen."""
    return {
        "past_key": past,
        "past_value": -past,
        "new_key": new,
        "new_value": -new,
        "past_length": np.array([past_length]),
        "pending_rows": rows,
        "pending_count": np.array([count]),
    }


def session_of(past: Floats, new: Floats, rows: Ints, fixed: bool) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4  # some of these runs are meant to fail or to copy
    options.intra_op_num_threads = 1
    model = one_node_model(past, new, len(rows), fixed=fixed).SerializeToString()
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run_onnxruntime(
    past: Floats, new: Floats, past_length: int, rows: Ints, count: int, *, fixed: bool = False
) -> Floats:
    key, value = session_of(past, new, rows, fixed).run(None, feed(past, new, past_length, rows, count))
    np.testing.assert_array_equal(value, -key)
    return key


def run_in_place(past: Floats, new: Floats, past_length: int, rows: Ints, count: int, *, fixed: bool = False) -> Floats:
    """ONNX Runtime with one buffer bound as past and present; the buffer after the run."""
    session = session_of(past, new, rows, fixed)
    binding = session.io_binding()
    inputs = feed(past, new, past_length, rows, count)
    buffers = {kind: ort.OrtValue.ortvalue_from_numpy(inputs.pop(f"past_{kind}").copy()) for kind in KINDS}
    for kind, buffer in buffers.items():
        binding.bind_ortvalue_input(f"past_{kind}", buffer)
        binding.bind_ortvalue_output(f"present_{kind}", buffer)
    for name, array in inputs.items():
        binding.bind_cpu_input(name, array)
    try:
        session.run_with_iobinding(binding)
    finally:
        after = {kind: buffer.numpy().copy() for kind, buffer in buffers.items()}
        np.testing.assert_array_equal(after["value"], -after["key"])
        past[:] = after["key"]
    return after["key"]


def run_reference_evaluator(
    past: Floats, new: Floats, past_length: int, rows: Ints, count: int, *, fixed: bool = False
) -> Floats:
    model = one_node_model(past, new, len(rows), fixed=fixed)
    key, value = ReferenceEvaluator(model).run(None, feed(past, new, past_length, rows, count))
    np.testing.assert_array_equal(value, -key)
    return key


ENGINES: dict[str, Move] = {
    "onnxruntime": run_onnxruntime,
    "onnxruntime in place": run_in_place,
    "onnx reference evaluator": run_reference_evaluator,
    "fixed shapes, onnxruntime": partial(run_onnxruntime, fixed=True),
    "fixed shapes, in place": partial(run_in_place, fixed=True),
    "fixed shapes, evaluator": partial(run_reference_evaluator, fixed=True),
}


def numbered_rows(rows: int, *, first: int, heads: int = 2, head_dim: int = 3) -> Floats:
    """[1, heads, rows, head_dim] in which every element names its row, head and place."""
    row = np.arange(first, first + rows, dtype=np.float32)[None, None, :, None]
    inside = np.arange(heads * head_dim, dtype=np.float32).reshape(1, heads, 1, head_dim)
    return row + inside / 100


@st.composite
def moves(draw: st.DrawFn) -> tuple[Floats, Floats, int, Ints, int]:
    """past, new, P, pending_rows and G of a pass that fits; the pending rows may lie anywhere behind P."""
    heads, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    slots, new_rows = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    past_length = draw(st.integers(0, 8))
    spare = draw(st.integers(0, 4))  # rows behind the last one that the body writes
    staged = slots + new_rows + spare
    count = draw(st.integers(0, slots))
    rows = draw(st.lists(st.integers(0, staged - 1), min_size=slots, max_size=slots))
    if draw(st.booleans()):  # a path: the root first, rows ascending
        rows = [0, *sorted(draw(st.sets(st.integers(1, staged - 1), min_size=slots - 1, max_size=slots - 1)))]
    past = numbered_rows(past_length + staged, first=1, heads=heads, head_dim=head_dim)
    new = numbered_rows(new_rows, first=1001, heads=heads, head_dim=head_dim)
    return past, new, past_length, np.array(rows), count


def check_move(move: Move, past: Floats, new: Floats, past_length: int, rows: Ints, count: int) -> None:
    """Check every row of the result by the row numbers that were put in."""
    before = past.copy()
    present = move(past, new, past_length, rows, count)
    staged = past_length + rows[:count]
    written = np.concatenate([before[:, :, staged], new], axis=2)  # [1, heads, G+N, head_dim]
    end = past_length + written.shape[2]
    np.testing.assert_array_equal(present[:, :, :past_length], before[:, :, :past_length])
    np.testing.assert_array_equal(present[:, :, past_length:end], written)
    slack = past_length + len(rows) + new.shape[2]  # up to here rows are unspecified, behind it untouched
    assert np.isfinite(present[:, :, end:slack]).all()
    np.testing.assert_array_equal(present[:, :, slack:], before[:, :, slack:])


@pytest.mark.parametrize("engine", ENGINES)
@settings(deadline=None, max_examples=40)
@given(move=moves())
def test_pending_rows_are_moved_and_new_rows_appended(engine: str, move: tuple[Any, ...]) -> None:
    check_move(ENGINES[engine], *move)


@settings(deadline=None)
@given(move=moves())
def test_the_numpy_reference_moves_pending_rows_and_appends_new_ones(move: tuple[Any, ...]) -> None:
    past, before = move[0], move[0].copy()
    check_move(compact_append_kv, *move)
    np.testing.assert_array_equal(past, before)  # a copy is written


def test_the_numpy_reference_writes_no_row_that_the_definition_does_not_name() -> None:
    past, new = numbered_rows(12, first=1), numbered_rows(2, first=1001)
    present = compact_append_kv(past, new, 3, np.array([0, 4, 1]), 2)
    np.testing.assert_array_equal(present[:, :, 7:], past[:, :, 7:])


# The worked round: prefix of 5 rows, nine staged rows, rows 0, 2 and 6 accepted


def worked_move() -> tuple[Floats, Floats, int, Ints, int]:
    past_length = ORACLES["nine_row_tree"]["prefix_length"]
    winning = np.array(ORACLES["fast_typical_round"]["winning_rows"])
    past = numbered_rows(past_length + len(ORACLES["nine_row_tree"]["staged_rows"]), first=0)
    return past, numbered_rows(2, first=1000), past_length, winning, len(winning)


def row_numbers(cache: Floats) -> list[int]:
    """The number that each row was made with."""
    return cache[0, 0, :, 0].astype(int).tolist()


@pytest.mark.parametrize("engine", ["numpy reference", *ENGINES])
def test_the_worked_round_moves_rows_5_7_11_to_5_6_7(engine: str) -> None:
    oracle = ORACLES["fast_typical_round"]
    move: Move = {"numpy reference": compact_append_kv, **ENGINES}[engine]
    present = move(*worked_move())
    numbers = row_numbers(present)
    assert [numbers[row] for row in oracle["destination_rows"]] == oracle["source_rows"] == [5, 7, 11]
    assert numbers[oracle["new_length"] : oracle["new_length"] + 2] == [1000, 1001]


# Faults that these checks must see


def sequential_in_place(past: Floats, new: Floats, past_length: int, rows: Ints, count: int) -> Floats:
    """Rows moved one by one in the buffer itself: a source may be overwritten before it is read."""
    present = past.copy()
    for slot in range(count):
        present[:, :, past_length + slot] = present[:, :, past_length + rows[slot]]
    present[:, :, past_length + count : past_length + count + new.shape[2]] = new
    return present


def append_first(past: Floats, new: Floats, past_length: int, rows: Ints, count: int) -> Floats:
    """The new rows are written before the pending ones are read."""
    present = past.copy()
    present[:, :, past_length + count : past_length + count + new.shape[2]] = new
    present[:, :, past_length : past_length + count] = present[:, :, past_length + rows[:count]]
    return present


def contiguous_suffix(past: Floats, new: Floats, past_length: int, rows: Ints, count: int) -> Floats:
    """The first G staged rows are committed whatever rows were accepted."""
    return compact_append_kv(past, new, past_length, np.arange(len(rows)), count)


def suffix_without_root(past: Floats, new: Floats, past_length: int, rows: Ints, count: int) -> Floats:
    """a rows instead of a + 1."""
    return compact_append_kv(past, new, past_length, rows, max(count - 1, 0))


def rows_of_another_path(past: Floats, new: Floats, past_length: int, rows: Ints, count: int) -> Floats:
    """Tokens of one path, keys and values of its neighbour."""
    return compact_append_kv(past, new, past_length, np.where(rows > 0, rows - 1, rows), count)


FAULTS: dict[str, tuple[Move, list[int]]] = {
    "a source is overwritten before it is read": (sequential_in_place, [0, 3, 1]),
    "new rows overwrite sources": (append_first, [0, 2, 6]),
    "a contiguous suffix is committed by length": (contiguous_suffix, [0, 2, 6]),
    "the root is not counted": (suffix_without_root, [0, 2, 6]),
    "rows of another path are committed": (rows_of_another_path, [0, 2, 6]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_tells_a_faulty_move_from_the_right_one(fault: str) -> None:
    faulty, rows = FAULTS[fault]
    past, new, past_length, _, count = worked_move()
    new = np.repeat(new, 3, axis=2)  # enough rows to reach the sources
    past = np.concatenate([past, numbered_rows(4, first=len(past[0, 0]))], axis=2)
    check_move(compact_append_kv, past, new, past_length, np.array(rows), count)
    with pytest.raises(AssertionError):
        check_move(faulty, past, new, past_length, np.array(rows), count)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rows", [[0, 3, 1], [2, 1, 0], [1, 0, 0], [3, 3, 3]])
def test_every_source_is_read_before_any_row_is_written(engine: str, rows: list[int]) -> None:
    past, new = numbered_rows(14, first=1), numbered_rows(6, first=1001)
    check_move(ENGINES[engine], past, new, 4, np.array(rows), 3)


# The end of the cache


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("past_length", range(9, 16))
def test_onnxruntime_refuses_to_write_past_the_last_row_and_leaves_the_cache_as_it_was(
    past_length: int, count: int, fixed: bool
) -> None:
    past, new, rows = numbered_rows(12, first=1), numbered_rows(3, first=1001), np.array([0, 1])
    before = past.copy()
    with pytest.raises(RuntimeError):
        run_in_place(past, new, past_length, rows, count, fixed=fixed)
    np.testing.assert_array_equal(past, before)


def test_with_fixed_shapes_as_many_rows_are_written_for_one_pending_row_as_for_two() -> None:
    """That is what the slack of the cache is for."""
    past, new, rows = numbered_rows(12, first=1), numbered_rows(3, first=1001), np.array([0, 1])
    with pytest.raises(RuntimeError):
        run_in_place(past, new, 8, rows, 1, fixed=True)


@pytest.mark.parametrize(("fixed", "past_length", "count"), [(True, 7, 2), (False, 7, 2), (False, 8, 1)])
def test_the_last_write_that_fits_reaches_the_last_row(fixed: bool, past_length: int, count: int) -> None:
    past, new, rows = numbered_rows(12, first=1), numbered_rows(3, first=1001), np.array([0, 1])
    assert row_numbers(run_in_place(past, new, past_length, rows, count, fixed=fixed))[-3:] == [1001, 1002, 1003]


def test_the_numpy_reference_refuses_to_write_past_the_last_row() -> None:
    past, new = numbered_rows(12, first=1), numbered_rows(3, first=1001)
    compact_append_kv(past, new, 7, np.array([0, 1]), 2)
    with pytest.raises(ValueError, match="rows up to 13 do not fit a cache of 12 rows"):
        compact_append_kv(past, new, 8, np.array([0, 1]), 2)
