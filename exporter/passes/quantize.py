"""Weight matrices of the backbone in 8 or 4 bits.

int8   x @ w  ->  dequantise(MatMulInteger(quantise(x), q)); a scale per row of x and one per column of w
int4   x @ w  ->  com.microsoft MatMulNBits: blocks of 32 weights along K, of 4 bits, a scale and a zero point each

Both give a row the same bits however many rows are computed beside it: with int8 the sums are of integers, and
everything else is by element; of MatMulNBits it was measured (blocks of 32, accuracy level 4, ONNX Runtime 1.32 on
x86-64). With the attention of `exact_attention.py` a round then gives the logits of plain steps, bit by bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from medusa_engine.exporter.passes.idle_heads import ancestors
from medusa_engine.exporter.passes.projections import projection
from medusa_engine.exporter.settings import INT4

CONTRIB_DOMAIN = "com.microsoft"
BLOCK = 32  # weights of int4 that share a scale
_LEAST_SCALE = 1e-30  # of a row of zeros
_ZERO_POINT = 128  # of rows in uint8: the kernels of x86-64 multiply uint8 with int8
_COMPUTE_INT8 = 4  # the accuracy level of MatMulNBits
_FLOAT = ir.DataType.FLOAT

Floats = npt.NDArray[np.float32]


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
        precision: `int8` or `int4`; int8 is also for weights whose K is no multiple of `BLOCK`.
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
        graph = model.graph
        backbone = ancestors([value for value in graph.outputs if value.name == self._logits])
        products = [(node, product) for node in graph if node in backbone and (product := _product(node)) is not None]
        rows_of: dict[ir.Value, _Rows] = {}
        zero_points: dict[str, ir.Value] = {}  # by the name of the number of rows
        for node, (rows, weight, bias) in products:
            tape = ir.tape.Tape()
            name = f"{node.inputs[1].name}.{self._precision}"
            if self._precision == INT4 and weight.shape[0] % BLOCK == 0:
                result = _int4(tape, rows, weight, name)
                graph.opset_imports[CONTRIB_DOMAIN] = 1
            else:
                if rows not in rows_of:
                    rows_of[rows] = _quantise_rows(tape, rows, zero_points, guarded=node is products[-1][0])
                result = _int8(tape, rows_of[rows], weight, name)
            if bias is not None:
                result = tape.op("Add", [result, bias])
            for value in tape.initializers:
                graph.register_initializer(value)
            size = sum(value.const_value.nbytes for value in tape.initializers if value.const_value is not None)
            self.stored = self.stored.with_product(weight.size, size, of_logits=node is products[-1][0])
            graph.insert_before(node, tape.nodes)
            _replace(graph, node, result)
        return ir.passes.PassResult(model, modified=bool(products))


class _Rows(NamedTuple):
    """Rows in uint8, [..., K], and the scale of each, [..., 1]."""

    quantised: ir.Value
    scale: ir.Value


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


def _quantise_rows(tape: ir.tape.Tape, rows: ir.Value, zero_points: dict[str, ir.Value], *, guarded: bool) -> _Rows:
    """Each row by its own largest magnitude, so that no row depends on the others of a pass.

    Args:
        zero_points: [N], made where there are none of this N yet.
        guarded: a row that is not finite gets the scale NaN. A maximum may leave NaN out; elsewhere the residual
            stream, to which the products are added, keeps it.
    """
    rank = len(rows.shape)
    axis = rank - 2  # of the rows: [R, K] or [1, N, K]
    others = [dimension for dimension in range(rank) if dimension != axis]
    largest = tape.op("ReduceMax", [tape.op("Abs", [rows]), _ints(tape, others)], {"keepdims": 0})  # [N]
    scale = tape.op("Mul", [largest, _float(tape, 1 / 127)])
    scale = tape.op("Max", [scale, _float(tape, _LEAST_SCALE)])
    if guarded:
        sums = tape.op("ReduceSum", [rows, _ints(tape, others)], {"keepdims": 0})
        scale = tape.op("Add", [scale, tape.op("Mul", [sums, _float(tape, 0.0)])])
    count = str(rows.shape[axis])
    if count not in zero_points:
        value = ir.tensor(np.array([_ZERO_POINT], dtype=np.uint8))
        zero_points[count] = tape.op("ConstantOfShape", [tape.op("Shape", [scale])], {"value": value})
    quantised = tape.op("QuantizeLinear", [rows, scale, zero_points[count]], {"axis": axis})
    return _Rows(quantised, tape.op("Unsqueeze", [scale, _ints(tape, [1])]))


def _int8(tape: ir.tape.Tape, rows: _Rows, weight: Floats, name: str) -> ir.Value:
    scale = (np.abs(weight).max(axis=0) / 127).astype(np.float32)  # [N]
    scale[scale == 0] = 1
    quantised = tape.initializer(ir.tensor(np.rint(weight / scale).astype(np.int8)), name)
    zero_point = tape.op("Constant", [], {"value": ir.tensor(np.uint8(_ZERO_POINT))})
    sums = tape.op("Cast", [tape.op("MatMulInteger", [rows.quantised, quantised, zero_point])], {"to": _FLOAT})
    return tape.op("Mul", [tape.op("Mul", [sums, rows.scale]), tape.initializer(ir.tensor(scale), f"{name}.scale")])


def _int4(tape: ir.tape.Tape, rows: ir.Value, weight: Floats, name: str) -> ir.Value:
    k, n = weight.shape
    blocks = weight.T.reshape(n, k // BLOCK, BLOCK)
    least, largest = np.minimum(blocks.min(axis=-1), 0), np.maximum(blocks.max(axis=-1), 0)  # [N, blocks]
    scale = ((largest - least) / 15).astype(np.float32)
    scale[scale == 0] = 1
    zero_point = np.rint(-least / scale).clip(0, 15).astype(np.uint8)
    quantised = (np.rint(blocks / scale[..., None]) + zero_point[..., None]).clip(0, 15).astype(np.uint8)
    if zero_point.shape[1] % 2:  # packed in pairs
        zero_point = np.pad(zero_point, ((0, 0), (0, 1)))
    inputs = [
        rows,
        tape.initializer(ir.tensor(_packed(quantised)), name),
        tape.initializer(ir.tensor(scale.reshape(-1)), f"{name}.scale"),
        tape.initializer(ir.tensor(_packed(zero_point).reshape(-1)), f"{name}.zero_point"),
    ]
    attributes = {"K": k, "N": n, "bits": 4, "block_size": BLOCK, "accuracy_level": _COMPUTE_INT8}
    return tape.op("MatMulNBits", inputs, attributes, domain=CONTRIB_DOMAIN)


def _packed(nibbles: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """[..., 2n] values below 16 -> [..., n] bytes, the first of a pair in the low half."""
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def _ints(tape: ir.tape.Tape, values: list[int]) -> ir.Value:
    return tape.op("Constant", [], {"value_ints": values})


def _float(tape: ir.tape.Tape, value: float) -> ir.Value:
    return tape.op("Constant", [], {"value_float": value})


def _replace(graph: ir.Graph, node: ir.Node, result: ir.Value) -> None:
    """Put `result` in the place of the one output of a node, which goes."""
    old = node.outputs[0]
    result.shape, result.type = old.shape, old.type
    ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
    name, old.name = old.name, None
    result.name = name
    graph.remove(node, safe=True)
