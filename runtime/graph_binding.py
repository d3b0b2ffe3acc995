"""The arrays that a graph reads and writes, bound to a session of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy.typing as npt
import onnxruntime as ort

from medusa_engine.runtime.providers import CPU

Arrays = Mapping[str, npt.NDArray[Any]]


class GraphBinding:
    """An `IOBinding` that is told only of arrays that it does not hold yet.

    Telling takes microseconds for each, and of two dozen nearly all are those of the pass before. Where the provider
    is not the CPU, an input is copied when it is bound, and so is bound for each pass.

    Args:
        session: of the graph.
        cache: by name without `past_` or `present_`; each is read and written where it lies.
        provider: the device of the session.
    """

    def __init__(self, session: ort.InferenceSession, cache: Mapping[str, ort.OrtValue], provider: str) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._on_cpu = provider == CPU
        self._bound: dict[str, npt.NDArray[Any]] = {}  # kept alive: the binding knows addresses only
        for name, value in cache.items():  # one buffer as past and present
            self._binding.bind_ortvalue_input(f"past_{name}", value)
            self._binding.bind_ortvalue_output(f"present_{name}", value)

    def run(self, inputs: Arrays, outputs: Arrays) -> None:
        """Run the graph; what arrays hold counts, and their identity says whether they are bound already.

        Raises:
            RuntimeError, ValueError, MemoryError: ONNX Runtime's, of a graph that is not what its manifest says.
        """
        self._bind(self._binding.bind_input, inputs, again=not self._on_cpu)
        self._bind(self._binding.bind_output, outputs)
        self._session.run_with_iobinding(self._binding)
        if not self._on_cpu:
            self._binding.synchronize_outputs()

    def _bind(self, bind: Callable[..., None], arrays: Arrays, *, again: bool = False) -> None:
        for name, array in arrays.items():
            if again or self._bound.get(name) is not array:
                bind(name, CPU, 0, array.dtype, array.shape, array.ctypes.data)
                self._bound[name] = array
