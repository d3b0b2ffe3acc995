from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from host_kernel import HostKernel, Launch
from tensorrt_stand_in import Built, build, stand_in

from medusa_engine.plugins.compact_append_kv import kernel, tensorrt_plugin
from medusa_engine.plugins.compact_append_kv.reference import compact_append_kv
from medusa_engine.plugins.compact_append_kv.tensorrt_plugin import (
    PLUGIN_ID,
    allow_aliasing,
    plugin_layers,
    register_plugin,
    supports_plugins,
)
from medusa_engine.runtime.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")

HEADS, CACHE_ROWS, SLOTS = 3, 40, 5


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setattr(tensorrt_plugin, "_ptx", {})
    yield from stand_in()


def layer(trt: Any, dtype: Any, head_dim: int, slots: int = SLOTS) -> Built:
    cache, new = (1, HEADS, CACHE_ROWS, head_dim), (1, HEADS, "N", head_dim)
    state = [(trt.int64, (size,)) for size in (1, slots, 1)]
    return build(trt, [(dtype, cache), (dtype, cache), (dtype, new), (dtype, new), *state], [0, 1])


def test_the_plan_gets_the_ptx_of_the_capability_under_the_name_of_its_entry(trt: Any) -> None:
    register_plugin(trt, "8.7")
    built = layer(trt, trt.float16, 64)
    assert built.kernel_name == kernel.ENTRY
    assert f".visible .entry {built.kernel_name}(" in built.ptx
    assert ".target sm_87" in built.ptx


def test_outputs_are_the_caches_in_place(trt: Any) -> None:
    register_plugin(trt, "8.9")
    built = layer(trt, trt.float16, 64)
    assert built.aliased_inputs == [0, 1]
    assert built.output_types == [trt.float16, trt.float16]
    shapes = [[size.get_constant_value() for size in shape] for shape in built.output_shapes]
    assert shapes == [[1, HEADS, CACHE_ROWS, 64]] * 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_only_the_types_of_the_network_are_offered(trt: Any, dtype: str) -> None:
    register_plugin(trt, "8.9")
    own, linear = getattr(trt, dtype), trt.TensorFormat.LINEAR
    types = [own] * 4 + [trt.int64] * 3 + [own] * 2
    assert layer(trt, own, 64).combinations == [(dtype, linear) for dtype in types]


@pytest.mark.parametrize(("dtype", "bits"), [("float32", np.uint32), ("float16", np.uint16), ("bfloat16", np.uint16)])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
def test_the_launch_that_tensorrt_is_told_runs_the_kernel_right(
    trt: Any, host_kernel: HostKernel, dtype: str, bits: Any, head_dim: int
) -> None:
    register_plugin(trt, "8.9")
    built = layer(trt, getattr(trt, dtype), head_dim)
    random = np.random.default_rng(head_dim)
    for new_rows in (1, 9, 27):  # one layer for all: N is a size of the run
        past, new = (
            tuple(random.integers(0, 2**16, (1, HEADS, rows, head_dim)).astype(bits) for _ in range(2))
            for rows in (CACHE_ROWS, new_rows)
        )
        launch = Launch(*built.evaluated({"N": new_rows}))
        assert launch == Launch.of(past[0], new[0], SLOTS)
        state = 8, np.array([0, 3, 4, 11, 0]), 4
        present, report = host_kernel(past, new, *state, launch=launch)
        assert not report.faults
        for after, before, rows in zip(present, past, new, strict=True):
            np.testing.assert_array_equal(after, compact_append_kv(before, rows, *state))


def test_registering_again_replaces_the_ptx(trt: Any) -> None:
    register_plugin(trt, "8.9")
    register_plugin(trt, "12.0")
    assert ".target sm_120" in layer(trt, trt.float16, 64).ptx


def test_more_slots_than_shared_memory_holds_are_refused(trt: Any) -> None:
    register_plugin(trt, "8.9")
    layer(trt, trt.float16, 64, kernel.MAX_SLOTS)
    with pytest.raises(ValueError, match="pending_rows has 769 entries, the kernel takes 768"):
        layer(trt, trt.float16, 64, kernel.MAX_SLOTS + 1)


def test_the_plugin_is_what_the_nodes_ask_for() -> None:
    from medusa_engine.plugins.compact_append_kv.body import DOMAIN, OP_TYPE, PLUGIN_ATTRIBUTES

    assert f"{PLUGIN_ATTRIBUTES['plugin_namespace']}::{OP_TYPE}" == PLUGIN_ID
    assert PLUGIN_ATTRIBUTES == {"plugin_namespace": DOMAIN, "plugin_version": "1", "aot": 1}


def test_tensorrt_rtx_takes_no_plugins() -> None:
    import tensorrt_rtx

    assert not supports_plugins(tensorrt_rtx)
    with pytest.raises(UserError) as caught:
        register_plugin(tensorrt_rtx, "8.9")
    assert "tensorrt_rtx" in caught.value.problem and "takes no plugins" in caught.value.problem
    assert "--no-plugin" in caught.value.hint


def test_a_capability_that_nvrtc_does_not_know_registers_nothing(trt: Any) -> None:
    with pytest.raises(UserError, match=r"compute capability '3\.5'"):
        register_plugin(trt, "3.5")
    assert not trt.get_plugin_registry().creators


def test_aliasing_is_switched_on_in_a_real_builder_config() -> None:
    import tensorrt_rtx as trt

    config = trt.Builder(trt.Logger(trt.Logger.ERROR)).create_builder_config()
    allow_aliasing(trt, config)
    assert config.get_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03)


def test_plugin_layers_are_counted() -> None:
    import tensorrt_rtx as trt

    kinds = [trt.LayerType.PLUGIN_V3, trt.LayerType.GATHER, trt.LayerType.PLUGIN_V3]
    network = SimpleNamespace(num_layers=3, get_layer=lambda i: SimpleNamespace(type=kinds[i]))
    assert plugin_layers(trt, network) == 2
