"""What goes into the cache was cleaned of NaN somewhere: a pass that does not see where refuses to go on."""

from __future__ import annotations

import math

import onnx_ir as ir
import pytest

from medusa_engine.exporter.passes.nan_of_drafts import uncleaned

ROWS = ir.Value(name="rows", shape=ir.Shape([1, 4, 8]), type=ir.TensorType(ir.DataType.FLOAT))
NAN_OUT = {"alpha": -math.inf}


def test_a_cleaning_is_found_behind_norm_rotation_and_split() -> None:
    tape = ir.tape.Tape()
    clean = tape.op("ThresholdedRelu", [ROWS], NAN_OUT)
    queries, keys = tape.op_multi_out("Split", [clean], {"num_outputs": 2}, num_outputs=2)
    rotated = tape.op("RotaryEmbedding", [tape.op("RMSNormalization", [keys, ROWS]), ROWS, ROWS])
    assert uncleaned(rotated) == (clean, ROWS)
    assert uncleaned(queries) == (clean, ROWS)


def test_what_stands_for_nan_is_a_cleaning() -> None:
    tape = ir.tape.Tape()
    kept = tape.op("Where", [tape.op("IsNaN", [ROWS]), ROWS, ROWS])
    assert uncleaned(kept) == (kept, ROWS)


def test_keys_that_keep_their_nan_are_not_passed_over() -> None:
    tape = ir.tape.Tape()
    clean = tape.op("ThresholdedRelu", [ROWS], NAN_OUT)
    for rows in (
        ROWS,
        tape.op("Add", [clean, ROWS]),
        tape.op("ThresholdedRelu", [ROWS], {"alpha": 0.0}),
        tape.op("RMSNormalization", [clean, ROWS], {"epsilon": 0.0}),  # 0 / 0
        tape.op("Where", [tape.op("IsInf", [ROWS]), ROWS, ROWS]),
    ):
        with pytest.raises(AssertionError, match="keys or values"):
            uncleaned(rows)
