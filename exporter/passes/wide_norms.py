"""Compute normalisation in fp32: the square of an fp16 number above 255 is infinite.

1. RMSNormalization(x, scale) of fp16 or bf16  ->  Cast(RMSNormalization(Cast(x), Cast(scale)))

The operator's `stash_type` asks for that already; TensorRT does not say that it looks at it.
"""

from __future__ import annotations

import onnx_ir as ir

_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class WideNormsPass(ir.passes.InPlacePass):
    """Rewrite each RMSNormalization of a narrow type."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if node.op_type == "RMSNormalization" and _dtype(node) in _NARROW]
        for node in nodes:
            (result,) = node.outputs
            narrow, shape = result.dtype, result.shape
            tape = ir.tape.Tape()
            inputs = [tape.op("Cast", [value], {"to": ir.DataType.FLOAT}) for value in node.inputs]
            model.graph.insert_before(node, tape.nodes)
            for place, value in enumerate(inputs):
                node.replace_input_with(place, value)
            result.type = ir.TensorType(ir.DataType.FLOAT)
            name, result.name = result.name, f"{result.name}_fp32"
            after = ir.tape.Tape()
            output = ir.Value(name=name, shape=shape, type=ir.TensorType(narrow))
            cast = after.op("Cast", [result], {"to": narrow}, output=output)
            model.graph.insert_after(node, after.nodes)
            for user, place in list(result.uses()):
                if user is not cast.producer():
                    user.replace_input_with(place, cast)
        return ir.passes.PassResult(model, modified=bool(nodes))


def _dtype(node: ir.Node) -> ir.DataType | None:
    return None if node.inputs[0] is None else node.inputs[0].dtype
