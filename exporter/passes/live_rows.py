"""Let the engine count the live cache rows itself.

1. input `live`  ->  Range(0, past_length + pending_count + N)

While tracing, `live` only carries the number of live rows as a shape: a length that depends on data does not
trace. Behind this pass the attention reads the rows that exist and not all S_max of the cache.
"""

from __future__ import annotations

import onnx_ir as ir

from medusa_engine.exporter.trace import LIVE_INPUT


class LiveRowsPass(ir.passes.InPlacePass):
    """Replace the input `live`; a model without it is left as it is."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        inputs = {value.name: value for value in graph.inputs}
        if LIVE_INPUT not in inputs:
            return ir.passes.PassResult(model, modified=False)
        tape = ir.tape.Tape()
        rows = tape.op("Shape", [inputs["input_ids"]], {"start": 1, "end": 2})  # [1]: N
        staged = tape.op("Add", [inputs["past_length"], inputs["pending_count"]])  # [1]
        end = tape.op("Squeeze", [tape.op("Add", [staged, rows])])  # []: live rows
        start = tape.op("Constant", [], {"value_int": 0})
        step = tape.op("Constant", [], {"value_int": 1})
        live = tape.op("Range", [start, end, step], output=ir.Value(name="live_columns"))
        graph.insert_before(graph[0], tape.nodes)
        ir.convenience.replace_all_uses_with(inputs[LIVE_INPUT], live)
        graph.inputs.remove(inputs[LIVE_INPUT])
        return ir.passes.PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        if any(value.name == LIVE_INPUT for value in model.graph.inputs):
            raise ir.passes.PostconditionError("the input `live` is still there")
