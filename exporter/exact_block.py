"""The block of quantised weights with which a row has the same bits whatever is computed beside it.

ONNX Runtime has kernels of its own for each block and each kind of processor, and some add up one row in another order
than several: with 4 bits those of blocks of 32 do on x86-64 without VNNI, those of 64 everywhere on x86-64; with 8 bits
none does that was looked at (version 1.32). It is tried here, on products as wide along K as the model's.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from medusa_engine.exporter.weight_blocks import COMPUTE_INT8, CONTRIB_DOMAIN, quantised

BLOCKS = {8: (64, 32, 16), 4: (16, 32)}  # by bits, the preferred one first

_COLUMNS = 71  # kernels take four at once; some are left over
_ROWS = 9
_OPSET, _IR_VERSION = 21, 10


def exact_block(bits: int, ks: Collection[int]) -> int:
    """The first of BLOCKS that is exact on this processor.

    Args:
        bits: 8 or 4.
        ks: K of each product of the model.

    Returns:
        The last of them where none is; `check_rows` then refuses the export.
    """
    *first, last = BLOCKS[bits]
    return next((block for block in first if all(rows_are_exact(bits, block, k) for k in ks)), last)


def rows_are_exact(bits: int, block: int, k: int) -> bool:
    """Whether each of several rows [R, K] gives the bits that it gives alone, for R up to _ROWS."""
    random = np.random.default_rng(0)
    weight = random.standard_normal((k, _COLUMNS)).astype(np.float32)
    rows = random.standard_normal((_ROWS, k)).astype(np.float32)
    session = ort.InferenceSession(
        _product(weight, bits, block).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    alone = np.concatenate([session.run(None, {"rows": row[None]})[0] for row in rows])
    return all(
        np.array_equal(session.run(None, {"rows": rows[:count]})[0], alone[:count]) for count in range(2, _ROWS + 1)
    )


def _product(weight: np.ndarray, bits: int, block: int) -> onnx.ModelProto:
    k, n = weight.shape
    names = ("weight", "scale", "zero_point")
    inputs = [
        numpy_helper.from_array(array, name) for name, array in zip(names, quantised(weight, bits, block), strict=False)
    ]
    node = helper.make_node(
        "MatMulNBits",
        ["rows", *(array.name for array in inputs)],
        ["product"],
        domain=CONTRIB_DOMAIN,
        K=k,
        N=n,
        bits=bits,
        block_size=block,
        accuracy_level=COMPUTE_INT8,
    )
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["R", size])
        for name, size in (("rows", k), ("product", n))
    ]
    graph = helper.make_graph([node], "product", values[:1], values[1:], inputs)
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(CONTRIB_DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)
