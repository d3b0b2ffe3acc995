"""The library that builds: which one, for which GPUs, with which timings. The full one is played by small stand-ins."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from medusa_engine.exporter import builder_library
from medusa_engine.exporter.build_log import Messages, essence
from medusa_engine.exporter.builder_library import Library, choose_capability, load_library
from medusa_engine.exporter.plan_network import check_used
from medusa_engine.exporter.timing_cache import attach_timing_cache, read_timing_cache, write_timing_cache
from medusa_engine.runtime.errors import UserError

RTX_NAMES = ("NONE", "CURRENT", "SM75", "SM89", "SM120")


def module(name: str, capabilities: tuple[str, ...] = ()) -> ModuleType:
    made = ModuleType(name)
    made.__version__ = "11.1.0"  # type: ignore[attr-defined]
    made.Builder = object  # type: ignore[attr-defined]
    if capabilities:
        members = {number: number for number in capabilities}
        made.ComputeCapability = SimpleNamespace(__members__=members)  # type: ignore[attr-defined]
    return made


def rtx() -> Library:
    return Library("tensorrt-rtx", module("tensorrt_rtx", RTX_NAMES))


def full() -> Library:
    return Library("tensorrt", module("tensorrt"))


def test_full_library_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(sys.modules, name, module(name))
    monkeypatch.setattr(builder_library, "find_spec", lambda _name: object())
    assert load_library(None).flavor == "tensorrt"
    assert load_library("tensorrt-rtx").flavor == "tensorrt-rtx"
    monkeypatch.setattr(builder_library, "find_spec", lambda name: object() if name == "tensorrt_rtx" else None)
    assert load_library(None).flavor == "tensorrt-rtx"


def test_capabilities_are_those_of_the_library() -> None:
    assert list(rtx().capabilities) == ["7.5", "8.9", "12.0"]
    assert list(full().capabilities) == []


@pytest.mark.parametrize(
    ("library", "wanted", "gpu", "chosen"),
    [
        (rtx, "8.9", None, "8.9"),
        (rtx, "12.0", "8.9", "12.0"),
        (rtx, None, "8.9", "8.9"),
        (rtx, None, "9.0", "9.0"),  # the GPU here is tried, under whatever name
        (rtx, "9.0", "9.0", "9.0"),
        (full, None, "8.7", "8.7"),
        (full, "8.7", "8.7", "8.7"),
    ],
)
def test_capability_is_the_users_or_that_of_the_gpu(library: Any, wanted: str, gpu: str, chosen: str) -> None:
    assert choose_capability(library(), wanted, gpu) == chosen


@pytest.mark.parametrize(
    ("library", "wanted", "gpu", "problem", "hint"),
    [
        (rtx, None, None, "no GPU here", "of 7.5, 8.9, 12.0"),
        (full, None, None, "no GPU here", "--flavor tensorrt-rtx"),
        (rtx, "9.0", "8.9", "does not build for compute capability 9.0", "of 7.5, 8.9, 12.0"),
        (full, "8.9", "8.6", "it has compute capability 8.6", "--flavor tensorrt-rtx"),
        (full, "8.9", None, "there is none", "--flavor tensorrt-rtx"),
        (rtx, "08.9", None, "not like 8.9", "of 7.5"),
    ],
)
def test_capability_that_is_not_built_for(library: Any, wanted: str, gpu: str, problem: str, hint: str) -> None:
    with pytest.raises(UserError) as refused:
        choose_capability(library(), wanted, gpu)
    assert problem in refused.value.problem
    assert hint in refused.value.hint


class Config:
    """A builder configuration as far as timing caches go."""

    def __init__(self, messages: Messages, *, refuses: str = "") -> None:
        self.messages, self.refuses = messages, refuses
        self.attached: bytes | None = None

    def create_timing_cache(self, data: bytes) -> bytes | None:
        if data and self.refuses == "corrupt":
            self.messages.add(1, "[timingCache.cpp::load::99] Error Code 1: API Usage Error (bad magic)")
            return None
        return data

    def set_timing_cache(self, cache: bytes, *, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        if cache and self.refuses == "foreign":
            return False
        self.attached = cache
        return True

    def get_timing_cache(self) -> Any:
        return SimpleNamespace(serialize=lambda: b"timings")


def test_timing_cache_is_read_used_and_written(tmp_path: Path) -> None:
    path = tmp_path / "timings"
    assert read_timing_cache(path) == b""
    path.write_bytes(b"earlier")
    config = Config(Messages())
    assert attach_timing_cache(config, read_timing_cache(path), config.messages) is None
    assert config.attached == b"earlier"
    assert write_timing_cache(config, path) is None
    assert path.read_bytes() == b"timings"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("fault", "said"), [("corrupt", "bad magic"), ("foreign", "another GPU")])
def test_timing_cache_of_no_use_makes_way_for_a_clean_build(fault: str, said: str) -> None:
    config = Config(Messages(), refuses=fault)
    reason = attach_timing_cache(config, b"whatever", config.messages)
    assert reason is not None and said in reason
    assert config.attached == b""
    assert config.messages.errors == [], "it is no error of the build"


def test_timing_cache_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the timing cache"):
        read_timing_cache(tmp_path)
    with pytest.raises(UserError, match="there is no folder"):
        read_timing_cache(tmp_path / "gone" / "timings")
    reason = write_timing_cache(Config(Messages()), tmp_path)
    assert reason is not None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "kept"),
    [  # said by TensorRT-RTX 1.7.1
        (
            "IBuilder::buildSerializedNetwork: Error Code 4: API Usage Error (ITopKLayer my_topk: my_topk: K exceeds"
            " the maximum value allowed (3840). In processCheck at /_src/optimizer/shapeof/graphShapeAnalyzer.cpp:1066"
            " In analyzeShapes at /_src/optimizer/shapeof/graphShapeAnalyzer.cpp:2825)",
            "ITopKLayer my_topk: my_topk: K exceeds the maximum value allowed (3840).",
        ),
        (
            "Invalid Node - my_mm\nITensor::getDimensions: Error Code 4: API Usage Error (my_mm: last dimension of"
            " input0 = 32 and second to last dimension of input1 = 7 but must match. In validate at"
            " /_src/optimizer/api/layers/matrixMultiplyLayer.cpp:192)\n[checkMacros.cpp::catchCudaError::250] Error"
            " Code 1: Cuda Runtime (In catchCudaError at /_src/common/dispatch/checkMacros.cpp:250 (cudaError 35: CUDA"
            " driver version is insufficient for CUDA runtime version))",
            "my_mm: last dimension of input0 = 32 and second to last dimension of input1 = 7 but must match.",
        ),
        (
            "IBuilder::buildSerializedNetwork: Error Code 1: Myelin ([pass.cpp:1500: run_passes] Cannot compile for"
            " target(s) sm75, because the model contains HW-specific datatypes: b16. In compileGraph at"
            " /_src/optimizer/myelin/codeGenerator.cpp:2012)",
            "Cannot compile for target(s) sm75, because the model contains HW-specific datatypes: b16.",
        ),
    ],
)
def test_message_without_the_librarys_sources(text: str, kept: str) -> None:
    assert essence(text) == kept


def test_error_is_told_with_what_is_known_of_its_node() -> None:
    messages = Messages()
    messages.add(4, "node_a [Add] inputs: [x -> (1)[INT64]], [y -> (2)[INT64]], ")
    messages.add(4, "node_ab [MatMul] inputs: [z -> (-1, 32)[HALF]], ")
    messages.add(1, "Error Code 1: Cuda Runtime (cudaError 35: CUDA driver version is insufficient)")
    messages.add(1, "Error Code 4: API Usage Error (node_ab: no such luck)")
    assert messages.essence() == "node_ab: no such luck (node_ab: MatMul of [z -> (-1, 32)[HALF]])"
    messages.clear(verbose=False)
    assert messages.essence() == "it gives no reason"


@pytest.mark.parametrize(
    "text",  # said by TensorRT-RTX 1.7.1 while it builds
    [
        "Unused Input: uniforms",
        "[RemoveDeadLayers] Input Tensor uniforms is unused or used only at compile-time, but is not being removed.",
    ],
)
def test_input_that_the_library_calls_unused_is_an_error(text: str) -> None:
    messages = Messages()
    messages.add(2, "Make sure input input_ids has Int64 binding.")
    check_used(messages, Path("round.onnx"))
    messages.add(2, text)
    with pytest.raises(UserError, match=r"round\.onnx: inputs that nothing uses: uniforms\n"):
        check_used(messages, Path("round.onnx"))


def test_an_interrupted_build_says_so_though_what_its_library_writes_is_dropped() -> None:
    """The stand-in for the library locks a mutex twice: no signal interrupts that."""
    program = (
        "import ctypes, os, signal, sys, threading\n"
        "from medusa_engine.exporter.build_cli import build_parser\n"
        "from medusa_engine.exporter.build_log import native_work\n"
        "from medusa_engine.runtime.command_line import run_command\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def work(_options):\n"
        "    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)\n"
        "    with native_work(verbose=False):\n"
        f"        threading.Timer(0.2, os.kill, (os.getpid(), {int(signal.SIGINT)})).start()\n"
        "        library.puts(b'what the library writes')\n"
        "        library.pthread_mutex_lock(mutex)\n"
        "        library.pthread_mutex_lock(mutex)\n"
        "sys.exit(run_command(build_parser(), work, ['bundle']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr, done.stdout) == (130, "\nmedusa-build: interrupted\n", "")
