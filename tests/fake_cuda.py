"""A stand-in for cuda.bindings.runtime: host memory at real addresses, and streams that run as late as they may.

Work in a stream waits until an event behind it, or the whole stream, is waited for: a read without its wait sees old
bytes, and so does a source that is written again before its copy ran. Memory that was never written is NaN.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np

Operation = Callable[[], None]


class cudaError_t(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorNotReady = 600
    cudaErrorIllegalAddress = 700
    cudaErrorStreamCaptureUnsupported = 900
    cudaErrorStreamCaptureInvalidated = 901


OK = cudaError_t.cudaSuccess


class Stream:
    def __init__(self, number: int) -> None:
        self.number = number
        self.waiting: list[Operation] = []
        self.captured: list[Operation] | None = None  # while it is captured
        self.broken = False

    def __int__(self) -> int:
        return self.number

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while self.waiting and not until():
            self.waiting.pop(0)()


class Event:
    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.recorded = self.reached = 0
        self.time = 0


class Properties:
    name = b"Imaginary GPU"
    major, minor = 8, 9


class FakeCudart:
    """The functions that runtime/cuda.py calls; each returns (status, results...).

    Attributes:
        calls: how often each was called.
        fail: function -> status that it returns from now on.
        devices: how many there are.
        launches: graphs that were launched.
        early: streams run as soon as they may instead.
    """

    cudaError_t = cudaError_t
    cudaStreamNonBlocking, cudaEventDefault = 1, 0

    class cudaMemcpyKind:
        cudaMemcpyDefault = 4

    class cudaStreamCaptureMode:
        cudaStreamCaptureModeThreadLocal = 1

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.fail: dict[str, cudaError_t] = {}
        self.devices = 1
        self.launches = 0
        self.early = False
        self.streams: dict[int, Stream] = {}
        self._memory: dict[int, np.ndarray[Any, Any]] = {}  # by address
        self._clock = 0

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if not name.startswith("cuda") or not callable(value) or isinstance(value, type):
            return value

        def called(*arguments: Any) -> tuple[Any, ...]:
            self.calls[name] += 1
            if name in self.fail and name != "cudaStreamEndCapture":
                return self.fail[name], None
            result: tuple[Any, ...] = value(*arguments)
            return (self.fail[name], None) if name in self.fail else result  # the capture has ended in any case

        return called

    @property
    def allocated(self) -> int:
        """Pieces of memory that were not freed."""
        return len(self._memory)

    def cudaGetErrorName(self, status: cudaError_t) -> tuple[Any, ...]:
        return OK, status.name.encode()

    def cudaGetErrorString(self, status: cudaError_t) -> tuple[Any, ...]:
        return OK, b"what it means"

    def cudaGetDeviceCount(self) -> tuple[Any, ...]:
        return OK, self.devices

    def cudaGetDevice(self) -> tuple[Any, ...]:
        return OK, 0

    def cudaGetDeviceProperties(self, device: int) -> tuple[Any, ...]:
        return OK, Properties()

    # Memory

    def cudaMalloc(self, count: int) -> tuple[Any, ...]:
        for stream in self.streams.values():
            if stream.captured is not None:
                stream.broken = True
                return cudaError_t.cudaErrorStreamCaptureUnsupported, None
        return self._allocate(count)

    def cudaHostAlloc(self, count: int, flags: int) -> tuple[Any, ...]:
        return self.cudaMalloc(count)

    def cudaFree(self, address: int) -> tuple[Any, ...]:
        if address not in self._memory:
            return (cudaError_t.cudaErrorInvalidValue,)
        for stream in self.streams.values():
            stream.run()
        del self._memory[address]
        return (OK,)

    def cudaFreeHost(self, address: int) -> tuple[Any, ...]:
        return self.cudaFree(address)

    def cudaMemcpyAsync(self, target: int, source: int, count: int, kind: Any, stream: Stream) -> tuple[Any, ...]:
        if not (self.holds(target, count) and self.holds(source, count)):
            return (cudaError_t.cudaErrorInvalidValue,)
        return self._put(stream, lambda: ctypes.memmove(target, source, count))

    def cudaMemcpy2DAsync(
        self, target: int, pitch: int, source: int, source_pitch: int, width: int, height: int, kind: Any, stream: Any
    ) -> tuple[Any, ...]:
        if width > min(pitch, source_pitch):
            return (cudaError_t.cudaErrorInvalidValue,)
        for row in range(height):
            status = self.cudaMemcpyAsync(target + row * pitch, source + row * source_pitch, width, kind, stream)
            if status != (OK,):
                return status
        return (OK,)

    def cudaMemsetAsync(self, target: int, value: int, count: int, stream: Stream) -> tuple[Any, ...]:
        if not self.holds(target, count):
            return (cudaError_t.cudaErrorInvalidValue,)
        return self._put(stream, lambda: ctypes.memset(target, value, count))

    def cudaMemset2DAsync(
        self, target: int, pitch: int, value: int, width: int, height: int, stream: Stream
    ) -> tuple[Any, ...]:
        if width > pitch:
            return (cudaError_t.cudaErrorInvalidValue,)
        for row in range(height):
            self.cudaMemsetAsync(target + row * pitch, value, width, stream)
        return (OK,)

    # Order

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        stream = Stream(len(self.streams) + 1)
        self.streams[stream.number] = stream
        return OK, stream

    def cudaStreamDestroy(self, stream: Stream) -> tuple[Any, ...]:
        return (OK,)

    def cudaStreamSynchronize(self, stream: Stream) -> tuple[Any, ...]:
        if stream.captured is not None:
            stream.broken = True
            return (cudaError_t.cudaErrorStreamCaptureUnsupported,)
        stream.run()
        return (OK,)

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        return OK, Event()

    def cudaEventDestroy(self, event: Event) -> tuple[Any, ...]:
        return (OK,)

    def cudaEventRecord(self, event: Event, stream: Stream) -> tuple[Any, ...]:
        event.stream = stream
        event.recorded += 1
        number = event.recorded

        def reach() -> None:
            self._clock += 1
            event.reached, event.time = number, self._clock

        return self._put(stream, reach)

    def cudaEventSynchronize(self, event: Event) -> tuple[Any, ...]:
        if event.stream is not None:
            event.stream.run(lambda: event.reached >= event.recorded)
        return (OK,)

    def cudaStreamWaitEvent(self, stream: Stream, event: Event, flags: int) -> tuple[Any, ...]:
        other, number = event.stream, event.recorded
        assert other is not None
        return self._put(stream, lambda: other.run(lambda: event.reached >= number))

    def cudaEventElapsedTime(self, start: Event, end: Event) -> tuple[Any, ...]:
        if start.reached < start.recorded or end.reached < end.recorded:
            return cudaError_t.cudaErrorNotReady, None
        return OK, float(end.time - start.time)

    # Graphs

    def cudaStreamBeginCapture(self, stream: Stream, mode: Any) -> tuple[Any, ...]:
        stream.captured, stream.broken = [], False
        return (OK,)

    def cudaStreamEndCapture(self, stream: Stream) -> tuple[Any, ...]:
        captured, stream.captured = stream.captured, None
        if stream.broken:
            return cudaError_t.cudaErrorStreamCaptureInvalidated, 0
        return OK, Graph(captured or [])

    def cudaGraphInstantiate(self, graph: Graph, flags: int) -> tuple[Any, ...]:
        return OK, Graph(graph.operations)

    def cudaGraphLaunch(self, graph: Graph, stream: Stream) -> tuple[Any, ...]:
        self.launches += 1
        stream.waiting.extend(graph.operations)
        if self.early:
            stream.run()
        return (OK,)

    def cudaGraphDestroy(self, graph: Graph) -> tuple[Any, ...]:
        return (OK,)

    def cudaGraphExecDestroy(self, graph: Graph) -> tuple[Any, ...]:
        return (OK,)

    def holds(self, address: int, count: int) -> bool:
        """Whether these bytes lie inside one piece of memory."""
        return any(begin <= address and address + count <= begin + len(piece) for begin, piece in self._memory.items())

    def put(self, stream: Stream, operation: Operation) -> None:
        """What a library enqueues."""
        self._put(stream, operation)

    def _allocate(self, count: int) -> tuple[Any, ...]:
        padded = np.full(count + 512, 0xFF, dtype=np.uint8)
        offset = -padded.ctypes.data % 256
        piece = padded[offset : offset + count]
        self._memory[piece.ctypes.data] = piece
        return OK, piece.ctypes.data

    def _put(self, stream: Stream, operation: Operation) -> tuple[Any, ...]:
        (stream.waiting if stream.captured is None else stream.captured).append(operation)
        if self.early:
            stream.run()
        return (OK,)


class Graph:
    def __init__(self, operations: list[Operation]) -> None:
        self.operations = list(operations)

    def __int__(self) -> int:
        return id(self)
