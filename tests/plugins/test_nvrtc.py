from __future__ import annotations

import sys

import pytest

from medusa_engine.plugins.nvrtc import compile_ptx, nvrtc_version
from medusa_engine.runtime.errors import UserError

KERNEL = 'extern "C" __global__ void fill(int* out) { out[threadIdx.x] = 1; }'


def test_ptx_is_for_the_capability_asked_for() -> None:
    ptx = compile_ptx(KERNEL, "fill.cu", "8.9")
    assert ".target sm_89" in ptx and ".visible .entry fill(" in ptx
    assert "\0" not in ptx


@pytest.mark.parametrize("capability", ["3.5", "8.95", "89", "sm_89", ""])
def test_an_unknown_capability_is_refused_with_those_that_are_known(capability: str) -> None:
    with pytest.raises(UserError) as caught:
        compile_ptx(KERNEL, "fill.cu", capability)
    assert repr(capability) in caught.value.problem
    assert "7.5" in caught.value.hint and "12.1" in caught.value.hint


def test_the_compilers_log_is_in_the_message() -> None:
    with pytest.raises(UserError) as caught:
        compile_ptx(KERNEL.replace("= 1", "= undefined_name"), "fill.cu", "8.9")
    assert "fill.cu(1): error" in caught.value.problem and "undefined_name" in caught.value.problem
    assert "\n" not in caught.value.problem


def test_missing_bindings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(UserError) as caught:
        compile_ptx(KERNEL, "fill.cu", "8.9")
    assert "without cuda-bindings" in caught.value.problem
    assert "pip install cuda-bindings nvidia-cuda-nvrtc" in caught.value.hint


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc

    def missing() -> None:
        raise RuntimeError("Failure finding libnvrtc.so.13\nsearched: ...")  # as cuda.pathfinder does

    monkeypatch.setattr(nvrtc, "nvrtcVersion", missing)
    with pytest.raises(UserError) as caught:
        nvrtc_version()
    assert caught.value.problem.endswith("without NVRTC: Failure finding libnvrtc.so.13")


def test_the_version_is_that_of_the_library() -> None:
    major, minor = nvrtc_version().split(".")
    assert int(major) >= 13 and minor.isdigit()
