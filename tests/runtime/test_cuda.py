"""Every status of CUDA is looked at; what is missing is named, with what to do about it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from fake_cuda import FakeCudart, cudaError_t

from medusa_engine.runtime.cuda import Cuda, CudaError, open_cuda
from medusa_engine.runtime.errors import UserError

# What each method calls first; `memory`, `stream`, `event` and `graph` are made before.
CALLS: dict[str, Callable[[Cuda, dict[str, Any]], Any]] = {
    "cudaGetDeviceCount": lambda cuda, made: Cuda(made["runtime"]),
    "cudaGetDevice": lambda cuda, made: Cuda(made["runtime"]),
    "cudaGetDeviceProperties": lambda cuda, made: Cuda(made["runtime"]),
    "cudaMalloc": lambda cuda, made: cuda.allocate(8),
    "cudaHostAlloc": lambda cuda, made: cuda.allocate_pinned(8),
    "cudaFree": lambda cuda, made: cuda.free(made["memory"]),
    "cudaFreeHost": lambda cuda, made: cuda.free_pinned(made["pinned"]),
    "cudaMemcpyAsync": lambda cuda, made: cuda.copy(made["memory"], made["memory"] + 4, 4, made["stream"]),
    "cudaMemcpy2DAsync": lambda cuda, made: cuda.copy_rows(
        made["memory"], 4, made["memory"] + 8, 4, 2, 2, made["stream"]
    ),
    "cudaMemsetAsync": lambda cuda, made: cuda.clear(made["memory"], 8, made["stream"]),
    "cudaMemset2DAsync": lambda cuda, made: cuda.clear_rows(made["memory"], 4, 2, 2, made["stream"]),
    "cudaStreamCreateWithFlags": lambda cuda, made: cuda.stream(),
    "cudaStreamDestroy": lambda cuda, made: cuda.destroy_stream(made["stream"]),
    "cudaStreamSynchronize": lambda cuda, made: cuda.synchronize(made["stream"]),
    "cudaEventCreateWithFlags": lambda cuda, made: cuda.event(),
    "cudaEventDestroy": lambda cuda, made: cuda.destroy_event(made["event"]),
    "cudaEventRecord": lambda cuda, made: cuda.record(made["event"], made["stream"]),
    "cudaEventSynchronize": lambda cuda, made: cuda.wait(made["event"]),
    "cudaStreamWaitEvent": lambda cuda, made: cuda.let_wait(made["stream"], made["event"]),
    "cudaEventElapsedTime": lambda cuda, made: cuda.seconds(made["event"], made["event"]),
    "cudaStreamBeginCapture": lambda cuda, made: cuda.capture(lambda: None, made["stream"]),
    "cudaStreamEndCapture": lambda cuda, made: cuda.capture(lambda: None, made["stream"]),
    "cudaGraphInstantiate": lambda cuda, made: cuda.capture(lambda: None, made["stream"]),
    "cudaGraphDestroy": lambda cuda, made: cuda.capture(lambda: None, made["stream"]),
    "cudaGraphLaunch": lambda cuda, made: cuda.launch(made["graph"], made["stream"]),
    "cudaGraphExecDestroy": lambda cuda, made: cuda.destroy_graph(made["graph"]),
}


@pytest.fixture
def runtime() -> FakeCudart:
    return FakeCudart()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("status", [cudaError_t.cudaErrorInvalidValue, cudaError_t.cudaErrorIllegalAddress])
def test_a_status_that_is_not_success_is_raised_with_the_call(
    runtime: FakeCudart, call: str, status: cudaError_t
) -> None:
    cuda = Cuda(runtime)
    stream, event = cuda.stream(), cuda.event()
    cuda.record(event, stream)
    cuda.synchronize(stream)
    made = {
        "runtime": runtime,
        "memory": cuda.allocate(64),
        "pinned": cuda.allocate_pinned(8),
        "stream": stream,
        "event": event,
        "graph": cuda.capture(lambda: None, stream),
    }
    CALLS[call](Cuda(runtime), dict(made) | {"memory": cuda.allocate(64), "pinned": cuda.allocate_pinned(8)})
    runtime.fail[call] = status
    with pytest.raises(CudaError) as caught:
        CALLS[call](cuda, made)
    assert (caught.value.call, caught.value.code) == (call, status.name)
    assert call in caught.value.problem and status.name in caught.value.problem and caught.value.hint


def test_every_call_of_the_layer_is_among_them(runtime: FakeCudart) -> None:
    defined = {name for name in dir(FakeCudart) if name.startswith("cuda") and callable(getattr(FakeCudart, name))}
    types = {"cudaError_t", "cudaMemcpyKind", "cudaStreamCaptureMode"}
    assert defined - types - {"cudaGetErrorName", "cudaGetErrorString"} == set(CALLS)


@pytest.mark.parametrize(
    ("status", "problem", "hint"),
    [
        (cudaError_t.cudaErrorInsufficientDriver, "no NVIDIA driver", "nvidia-smi"),
        (cudaError_t.cudaErrorNoDevice, "no NVIDIA driver", "nvidia-smi"),
    ],
)
def test_no_driver_and_no_gpu_are_said(
    runtime: FakeCudart, monkeypatch: pytest.MonkeyPatch, status: cudaError_t, problem: str, hint: str
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", runtime)
    runtime.fail["cudaGetDeviceCount"] = status
    with pytest.raises(UserError) as caught:
        open_cuda()
    assert problem in caught.value.problem and hint in caught.value.hint
    runtime.fail.clear()
    runtime.devices = 0
    with pytest.raises(UserError, match="no NVIDIA driver or GPU"):
        open_cuda()


def test_memory_that_does_not_suffice_is_said(runtime: FakeCudart) -> None:
    cuda = Cuda(runtime)
    runtime.fail["cudaMalloc"] = cudaError_t.cudaErrorMemoryAllocation
    with pytest.raises(UserError, match="the GPU's memory does not suffice") as caught:
        cuda.allocate(1 << 40)
    assert "--max-length" in caught.value.hint


def test_missing_bindings_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(UserError, match="cuda-bindings") as caught:
        open_cuda()
    assert "pip install '.[tensorrt]' or '.[tensorrt-rtx]' in a clone" in caught.value.hint


def test_the_bindings_have_every_name_that_the_layer_uses() -> None:
    real = pytest.importorskip("cuda.bindings.runtime", reason="needs cuda-bindings")
    names = [*CALLS, "cudaGetErrorName", "cudaGetErrorString", "cudaStreamNonBlocking", "cudaEventDefault"]
    assert [name for name in names if not hasattr(real, name)] == []
    assert real.cudaMemcpyKind.cudaMemcpyDefault and real.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    _, count = real.cudaGetDeviceCount()
    if count:
        cuda = open_cuda()
        assert cuda.name and float(cuda.compute_capability) >= 7
    else:
        with pytest.raises(UserError, match="no NVIDIA driver or GPU"):
            open_cuda()


def test_a_capture_runs_nothing_and_a_launch_all_of_it(runtime: FakeCudart) -> None:
    cuda = Cuda(runtime)
    stream, memory = cuda.stream(), cuda.allocate_pinned(8)
    source = cuda.allocate_pinned(8)
    source[:] = 7
    graph = cuda.capture(lambda: cuda.copy(memory.ctypes.data, source.ctypes.data, 8, stream), stream)
    cuda.synchronize(stream)
    assert not memory.any()
    for value in (7, 9):
        source[:] = value
        cuda.launch(graph, stream)
        cuda.synchronize(stream)
        assert set(memory.tolist()) == {value}


def test_a_capture_whose_work_fails_leaves_the_stream_usable(runtime: FakeCudart) -> None:
    cuda = Cuda(runtime)
    stream, memory = cuda.stream(), cuda.allocate_pinned(8)

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cuda.capture(fail, stream)
    cuda.clear(memory.ctypes.data, 8, stream)
    cuda.synchronize(stream)
