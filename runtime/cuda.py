"""A thin layer over cuda.bindings.runtime: every status is checked, and a failure says what was called.

Nothing here is imported before a plan is opened: the runtime's base install has no cuda-bindings.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from medusa_engine.runtime.errors import UserError

_MODULE = "cuda.bindings.runtime"
_NO_GPU = ("cudaErrorInsufficientDriver", "cudaErrorNoDevice", "cudaErrorSystemDriverMismatch")
_NO_MEMORY = ("cudaErrorMemoryAllocation",)

# What CUDA names: addresses are numbers, streams, events and graphs are handles of the bindings.
Stream = Any
Event = Any
Graph = Any


class CudaError(UserError):
    """A call of CUDA failed.

    Attributes:
        call: the function.
        code: name of its status, such as cudaErrorMemoryAllocation.
    """

    def __init__(self, call: str, code: str, meaning: str) -> None:
        self.call = call
        self.code = code
        if code in _NO_GPU:
            problem = f"no NVIDIA driver or GPU that CUDA can use: {code}: {meaning}"
            hint = "run it on a machine where nvidia-smi lists a GPU, or export the model for the CPU: without --target"
        elif code in _NO_MEMORY:
            problem = f"the GPU's memory does not suffice: {call}: {code}: {meaning}"
            hint = "end other programs on the GPU or sessions, or export with a smaller medusa-export --max-length"
        else:
            problem = f"{call} failed: {code}: {meaning}"
            hint = "start again; if it comes back, look at the GPU with nvidia-smi, and report it with this line"
        super().__init__(problem, hint)


def open_cuda() -> Cuda:
    """The current CUDA device; CUDA_VISIBLE_DEVICES chooses another.

    Raises:
        UserError: cuda-bindings is not installed, or there is no driver or no GPU.
    """
    try:
        runtime = importlib.import_module(_MODULE)
    except ImportError as error:
        raise UserError(
            f"a plan runs through cuda-bindings, which Python cannot import: {error}",
            "install it: pip install '.[tensorrt]' or '.[tensorrt-rtx]' in a clone of medusa-engine",
        ) from error
    return Cuda(runtime)


class Cuda:
    """One device. Addresses are device or pinned host memory alike; sizes and pitches are bytes.

    Args:
        runtime: `cuda.bindings.runtime`.

    Attributes:
        name: of the device.
        compute_capability: of it: "8.9".

    Raises:
        CudaError: here and in every method, a call that failed.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        if self._call("cudaGetDeviceCount") < 1:
            raise CudaError("cudaGetDeviceCount", "cudaErrorNoDevice", "no CUDA-capable device is detected")
        device = self._call("cudaGetDevice")
        properties = self._call("cudaGetDeviceProperties", device)
        name = properties.name
        self.name = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
        self.compute_capability = f"{properties.major}.{properties.minor}"

    # Memory

    def allocate(self, count: int) -> int:
        """`count` bytes of device memory, aligned to 256."""
        return int(self._call("cudaMalloc", count))

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def allocate_pinned(self, count: int) -> npt.NDArray[np.uint8]:
        """`count` zero bytes of page-locked host memory; the array does not own them."""
        address = int(self._call("cudaHostAlloc", count, 0))
        array = np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))
        array[:] = 0
        return array

    def free_pinned(self, array: npt.NDArray[np.uint8]) -> None:
        self._call("cudaFreeHost", array.ctypes.data)

    def copy(self, target: int, source: int, count: int, stream: Stream) -> None:
        """Copy `count` bytes when the stream comes to it."""
        self._call("cudaMemcpyAsync", target, source, count, self._runtime.cudaMemcpyKind.cudaMemcpyDefault, stream)

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: Stream
    ) -> None:
        """Copy `height` rows of `width` bytes that begin `pitch` bytes apart."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDefault
        self._call("cudaMemcpy2DAsync", target, target_pitch, source, source_pitch, width, height, kind, stream)

    def clear(self, target: int, count: int, stream: Stream) -> None:
        """Zero `count` bytes."""
        self._call("cudaMemsetAsync", target, 0, count, stream)

    def clear_rows(self, target: int, pitch: int, width: int, height: int, stream: Stream) -> None:
        """Zero `height` rows of `width` bytes that begin `pitch` bytes apart."""
        self._call("cudaMemset2DAsync", target, pitch, 0, width, height, stream)

    # Order

    def stream(self) -> Stream:
        """A stream that does not wait for the default one."""
        return self._call("cudaStreamCreateWithFlags", self._runtime.cudaStreamNonBlocking)

    def destroy_stream(self, stream: Stream) -> None:
        self._call("cudaStreamDestroy", stream)

    def synchronize(self, stream: Stream) -> None:
        """Wait for everything in the stream: never inside the round loop."""
        self._call("cudaStreamSynchronize", stream)

    def event(self) -> Event:
        return self._call("cudaEventCreateWithFlags", self._runtime.cudaEventDefault)

    def destroy_event(self, event: Event) -> None:
        self._call("cudaEventDestroy", event)

    def record(self, event: Event, stream: Stream) -> None:
        """Let the event stand for what is in the stream now."""
        self._call("cudaEventRecord", event, stream)

    def wait(self, event: Event) -> None:
        """Let the host wait for what was in the stream when the event was recorded, and for nothing behind it."""
        self._call("cudaEventSynchronize", event)

    def let_wait(self, stream: Stream, event: Event) -> None:
        """Let what comes into the stream wait for the event, on the device."""
        self._call("cudaStreamWaitEvent", stream, event, 0)

    def seconds(self, start: Event, end: Event) -> float:
        """Device time from one event to the other; both have been reached."""
        return float(self._call("cudaEventElapsedTime", start, end)) / 1000

    # Graphs

    def capture(self, work: Callable[[], None], stream: Stream) -> Graph:
        """What `work` puts into the stream, as a graph that `launch` replays; nothing of it runs now.

        Raises:
            CudaError: something in it cannot be captured.
            UserError: what `work` raises; the stream is then as before.
        """
        # Of this thread alone: other sessions may allocate meanwhile.
        mode = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", stream, mode)
        try:
            work()
        except BaseException:
            _, graph = self._runtime.cudaStreamEndCapture(stream)  # its status repeats that the capture is broken
            if graph is not None and int(graph):
                self._call("cudaGraphDestroy", graph)
            raise
        graph = self._call("cudaStreamEndCapture", stream)
        try:
            return self._call("cudaGraphInstantiate", graph, 0)
        finally:
            self._call("cudaGraphDestroy", graph)

    def launch(self, graph: Graph, stream: Stream) -> None:
        self._call("cudaGraphLaunch", graph, stream)

    def destroy_graph(self, graph: Graph) -> None:
        self._call("cudaGraphExecDestroy", graph)

    def _call(self, call: str, *arguments: Any) -> Any:
        status, *results = getattr(self._runtime, call)(*arguments)
        if status != self._runtime.cudaError_t.cudaSuccess:
            name, meaning = (
                value.decode(errors="replace") if isinstance(value, bytes) else str(value)
                for value in (self._runtime.cudaGetErrorName(status)[1], self._runtime.cudaGetErrorString(status)[1])
            )
            raise CudaError(call, name, meaning)
        return results[0] if results else None
