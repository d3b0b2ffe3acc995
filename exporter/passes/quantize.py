"""Weight matrices of the backbone in 8 or 4 bits: x @ w  ->  com.microsoft MatMulNBits

Blocks of weights along K share a scale, with 4 bits a zero point too; rows of x are quantised to 8 bits, block by block
(accuracy level 4). With a block that `exact_block.py` finds, a row has the same bits however many are computed beside
it, and with the attention of `exact_attention.py` a round gives the logits of plain steps, bit by bit.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from medusa_engine.exporter.exact_block import exact_block
from medusa_engine.exporter.passes.idle_heads import ancestors
from medusa_engine.exporter.passes.projections import projection
from medusa_engine.exporter.settings import BITS
from medusa_engine.exporter.weight_blocks import COMPUTE_INT8, CONTRIB_DOMAIN, Floats, quantised


class Stored(NamedTuple):
    """What became of the weight matrices, for the cost ledger.

    Attributes:
        layer_elements: numbers in the matrices of the layers that were quantised.
        layer_bytes: of those, scales and zero points included.
        lm_bytes: of the LM projection, likewise.
    """

    layer_elements: int
    layer_bytes: int
    lm_bytes: int

    def with_product(self, elements: int, size: int, *, of_logits: bool) -> Stored:
        if of_logits:
            return self._replace(lm_bytes=size)
        return self._replace(layer_elements=self.layer_elements + elements, layer_bytes=self.layer_bytes + size)


class QuantizePass(ir.passes.InPlacePass):
    """Rewrite the products that the logits depend on; what only the drafts of the heads depend on stays in fp32.

    Args:
        precision: of `BITS`.
        logits: name of the graph's output of target logits.

    Attributes:
        stored: after the pass, how much it wrote.
    """

    def __init__(self, precision: str, logits: str) -> None:
        super().__init__()
        self._precision = precision
        self._logits = logits
        self.stored = Stored(0, 0, 0)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, bits = model.graph, BITS[self._precision]
        backbone = ancestors([value for value in graph.outputs if value.name == self._logits])
        products = [(node, product) for node in graph if node in backbone and (product := _product(node)) is not None]
        block = exact_block(bits, {weight.shape[0] for _, (_, weight, _) in products})
        for node, (rows, weight, bias) in products:
            tape = ir.tape.Tape()
            k, n = weight.shape
            inputs = [
                tape.initializer(ir.tensor(array), f"{node.inputs[1].name}.{self._precision}{suffix}")
                for suffix, array in zip(("", ".scale", ".zero_point"), quantised(weight, bits, block), strict=False)
            ]
            attributes = {"K": k, "N": n, "bits": bits, "block_size": block, "accuracy_level": COMPUTE_INT8}
            result = tape.op("MatMulNBits", [rows, *inputs], attributes, domain=CONTRIB_DOMAIN)
            if bias is not None:
                result = tape.op("Add", [result, bias])
            for value in tape.initializers:
                graph.register_initializer(value)
            size = sum(value.const_value.nbytes for value in inputs)
            self.stored = self.stored.with_product(weight.size, size, of_logits=node is products[-1][0])
            graph.insert_before(node, tape.nodes)
            _replace(graph, node, result)
        graph.opset_imports[CONTRIB_DOMAIN] = 1
        return ir.passes.PassResult(model, modified=bool(products))


def _product(node: ir.Node) -> tuple[ir.Value, Floats, ir.Value | None] | None:
    """Rows, weight [K, N] and bias of a product with a constant matrix; None for any other node."""
    if node.op_type == "Gemm" and node.domain == "" and node.inputs[1].const_value is not None:
        numbers = {name: attribute.value for name, attribute in node.attributes.items()}
        if numbers.get("alpha", 1.0) == numbers.get("beta", 1.0) == 1.0 and not numbers.get("transA", 0):
            weight = node.inputs[1].const_value.numpy()
            bias = node.inputs[2] if len(node.inputs) > 2 else None
            return node.inputs[0], weight.T if numbers.get("transB", 0) else weight, bias
    rows, constant = projection(node)
    return None if rows is None or constant is None else (rows, constant.numpy(), None)


def _replace(graph: ir.Graph, node: ir.Node, result: ir.Value) -> None:
    """Put `result` in the place of the one output of a node, which goes."""
    old = node.outputs[0]
    result.shape, result.type = old.shape, old.type
    ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
    name, old.name = old.name, None
    result.name = name
    graph.remove(node, safe=True)
