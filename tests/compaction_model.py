"""A model that is one medusa::CompactAppendKV node with its body."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import onnx
from onnx import helper

from medusa_engine.plugins.compact_append_kv.body import (
    DOMAIN,
    DOMAIN_VERSION,
    OP_TYPE,
    PLUGIN_ATTRIBUTES,
    compact_append_kv_function,
)

OPSET = 24
IR_VERSION = 11
KINDS = ("key", "value")


def one_node_model(past: npt.NDArray[Any], new: npt.NDArray[Any], slots: int, *, fixed: bool) -> onnx.ModelProto:
    """The model, in the type of past and new [1, H_kv, rows, head_dim]; its number of new rows is open.

    Args:
        fixed: with the body of fixed shapes.
    """
    float_, int64 = helper.np_dtype_to_tensor_dtype(past.dtype), onnx.TensorProto.INT64

    def value(name: str, dtype: int, shape: Any) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, dtype, shape)

    rows = (*new.shape[:2], "N", new.shape[3])
    inputs = [value(f"past_{kind}", float_, past.shape) for kind in KINDS]
    inputs += [value(f"new_{kind}", float_, rows) for kind in KINDS]
    inputs += [value("past_length", int64, [1]), value("pending_rows", int64, [slots])]
    inputs += [value("pending_count", int64, [1])]
    outputs = [value(f"present_{kind}", float_, past.shape) for kind in KINDS]
    node = helper.make_node(
        OP_TYPE,
        [i.name for i in inputs],
        [o.name for o in outputs],
        domain=DOMAIN,
        **PLUGIN_ATTRIBUTES,
    )
    model = helper.make_model(
        helper.make_graph([node], "one_node", inputs, outputs),
        functions=[compact_append_kv_function(fixed=fixed)],
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)],
        ir_version=IR_VERSION,
    )
    onnx.checker.check_model(model, full_check=True)
    return model
