"""What a machine can do: bytes per second of large reads, FLOPs per second of large matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from medusa_engine.benchmarks.measure import Samples
from medusa_engine.runtime.roofline import Machine

READ_BYTES = 256 << 20  # far beyond any cache
PRODUCT = (512, 1024, 1024)  # rows, inner, columns of the matrices

_OPSET = 21
_IR_VERSION = 10


@dataclass(frozen=True)
class Rates:
    """Measured rates.

    Attributes:
        read: GB/s of reading one large array, all threads together.
        product: GFLOP/s of ONNX Runtime's fp32 matrix product, a multiply-add being two.
    """

    read: Samples
    product: Samples

    @property
    def machine(self) -> Machine:
        """The best of each: what the machine can do when nothing else runs."""
        return Machine(1e9 * max(self.read.values), 1e9 * max(self.product.values))


def measure_rates(
    threads: int, repeats: int, *, progress: Callable[[], None] = lambda: None, read_bytes: int = READ_BYTES
) -> Rates:
    """Measure both on so many threads; takes `read_bytes` of memory.

    Args:
        threads: at least 1.
        progress: called behind each measurement.
    """
    return Rates(
        Samples("memory reads", "GB/s", tuple(_reads(threads, repeats, progress, read_bytes))),
        Samples("matrix products", "GFLOP/s", tuple(_products(threads, repeats, progress))),
    )


def _reads(threads: int, repeats: int, progress: Callable[[], None], read_bytes: int) -> list[float]:
    array = np.ones(read_bytes // 8, dtype=np.int64)
    chunks = np.array_split(array, threads)
    rates = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(1 + repeats):
            started = time.perf_counter()
            total = sum(pool.map(np.sum, chunks))  # numpy lets the other threads run meanwhile
            rates.append(array.nbytes / (time.perf_counter() - started) / 1e9)
            assert total == len(array)
            progress()
    return rates[1:]


def _products(threads: int, repeats: int, progress: Callable[[], None]) -> list[float]:
    rows, inner, columns = PRODUCT
    weight = np.ones((inner, columns), dtype=np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (rows, inner))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (rows, columns))],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    x = np.ones((rows, inner), dtype=np.float32)
    rates = []
    for _ in range(1 + repeats):
        started = time.perf_counter()
        session.run(None, {"x": x})
        rates.append(2 * rows * inner * columns / (time.perf_counter() - started) / 1e9)
        progress()
    return rates[1:]
