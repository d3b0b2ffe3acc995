"""`medusa::CompactAppendKV` as an ONNX model-local function: the body every engine can run without the plugin.

    (past_key, past_value, new_key, new_value, past_length, pending_rows, pending_count)
      -> (present_key, present_value)

    past_*, present_*  [1, H_kv, S_max, head_dim]   the cache of one layer, updated in place where the engine can
    new_*              [1, H_kv, N, head_dim]       rows of this pass
    past_length        [1] int64                    P, committed rows
    pending_rows       [D+1] int64                  packed rows accepted by the previous pass, staged at P + row
    pending_count      [1] int64                    G, how many of them count

Rows P ... P+G-1 become the pending rows, rows P+G ... P+G+N-1 the new ones. There are two bodies:

- of as many rows as there are: one gather, one write of G+N rows. Their number is data, which only engines with
  dynamic shapes take.
- of fixed shapes, for TensorRT: it always writes D+1+N rows at P, through an index that every layer computes anew;
  those past P+G+N repeat the last new row, so the cache needs D+1 rows of slack.
"""

from __future__ import annotations

import onnx
from onnxscript import script, values
from onnxscript.onnx_opset import opset24 as op

DOMAIN = "medusa"
OP_TYPE = "CompactAppendKV"
DOMAIN_VERSION = 1
# What TensorRT's parser reads at a node: the first makes it look for a registered plugin (and import the function
# where there is none), the second is that plugin's version, the third asks for its ahead-of-time form.
PLUGIN_ATTRIBUTES: dict[str, str | int] = {"plugin_namespace": DOMAIN, "plugin_version": "1", "aot": 1}

_medusa = values.Opset(DOMAIN, DOMAIN_VERSION)


@script(_medusa, default_opset=op)
def _of_any_count(past_key, past_value, new_key, new_value, past_length, pending_rows, pending_count):  # type: ignore[no-untyped-def]
    # The same in every layer: ONNX Runtime computes it once.
    source = op.Slice(op.Add(pending_rows, past_length), op.Constant(value_ints=[0]), pending_count)  # [G]
    key = op.Concat(op.Gather(past_key, source, axis=2), new_key, axis=2)  # [1, H_kv, G+N, head_dim]
    value = op.Concat(op.Gather(past_value, source, axis=2), new_value, axis=2)
    present_key = op.TensorScatter(past_key, key, past_length, axis=2)
    present_value = op.TensorScatter(past_value, value, past_length, axis=2)
    return present_key, present_value


@script(_medusa, default_opset=op)
def _of_fixed_shapes(past_key, past_value, new_key, new_value, past_length, pending_rows, pending_count):  # type: ignore[no-untyped-def]
    slots = op.Shape(pending_rows)  # [1]: D+1
    written = op.Add(slots, op.Shape(new_key, start=2, end=3))  # [1]: D+1+N
    i = op.Range(op.Constant(value_int=0), op.Squeeze(written), op.Constant(value_int=1))
    # Source of written row i among [pending rows | new rows]: i while i < G, then the new rows, clamped.
    behind = op.Min(op.Add(i, op.Sub(slots, pending_count)), op.Sub(written, op.Constant(value_ints=[1])))
    index = op.Where(op.Less(i, pending_count), i, behind)
    source = op.Add(pending_rows, past_length)
    key = op.Gather(op.Concat(op.Gather(past_key, source, axis=2), new_key, axis=2), index, axis=2)
    value = op.Gather(op.Concat(op.Gather(past_value, source, axis=2), new_value, axis=2), index, axis=2)
    present_key = op.TensorScatter(past_key, key, past_length, axis=2)
    present_value = op.TensorScatter(past_value, value, past_length, axis=2)
    return present_key, present_value


def compact_append_kv_function(*, fixed: bool) -> onnx.FunctionProto:
    """The function as a proto, declaring the attributes that TensorRT's parser looks for.

    Args:
        fixed: the body whose shapes do not depend on data.
    """
    function = (_of_fixed_shapes if fixed else _of_any_count).to_function_proto()
    function.name = OP_TYPE
    function.attribute.extend(PLUGIN_ATTRIBUTES)
    return function
