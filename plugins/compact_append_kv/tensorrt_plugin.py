"""`medusa::CompactAppendKV` registered with `tensorrt.plugin`: a quick plugin in its ahead-of-time form.

TensorRT embeds the PTX and the launch parameters in the plan: the machine that runs the plan needs neither this code
nor a shared library, only a driver that takes PTX of the NVRTC release used (`nvrtc.nvrtc_version`).

`trt` is the module `tensorrt` throughout. `tensorrt_rtx` has the same API but no plugins, and builds the function
body. What has been run: see plugins/README.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import GenericAlias
from typing import Any

from medusa_engine.plugins.compact_append_kv import kernel
from medusa_engine.plugins.nvrtc import compile_ptx
from medusa_engine.runtime.errors import UserError

PLUGIN_ID = "medusa::CompactAppendKV"
INPUTS = ("past_key", "past_value", "new_key", "new_value", "past_length", "pending_rows", "pending_count")

_ptx: dict[str, str] = {}  # by module name: what a registered plugin hands to TensorRT


def supports_plugins(trt: Any) -> bool:
    """Return whether the library takes plugins in ahead-of-time form (not TensorRT-RTX, nor TensorRT before 10.9)."""
    try:
        plugin = importlib.import_module(f"{trt.__name__}.plugin")
    except (ImportError, AttributeError):
        return False
    return hasattr(plugin, "aot_impl")


def register_plugin(trt: Any, compute_capability: str) -> None:
    """Compile the kernel and register the plugin: from now on the ONNX parser of this process prefers it to the body.

    Call it before parsing, and `allow_aliasing` on the builder config. Without this call the parser imports the
    function body. A second call replaces the PTX; there is no way back to the body in the same process.

    Args:
        compute_capability: of the device that shall run the plan, as "8.9".

    Raises:
        UserError: the library takes no plugins, NVRTC is missing or does not know the capability.
    """
    if not supports_plugins(trt):
        raise UserError(
            f"{trt.__name__} {trt.__version__} takes no plugins in ahead-of-time form",
            "build with --no-plugin, or with the full TensorRT library (--flavor tensorrt)",
        )
    ptx = compile_ptx(kernel.source(), "compact_append_kv.cu", compute_capability)
    if trt.__name__ not in _ptx:
        _register(trt, importlib.import_module(f"{trt.__name__}.plugin"))
    _ptx[trt.__name__] = ptx


def allow_aliasing(trt: Any, config: Any) -> None:
    """Let plugins of this build write their inputs in place: a preview feature of the builder config.

    The network inputs past_* and outputs present_* of a layer then have to be bound to one address.
    """
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)


def plugin_layers(trt: Any, network: Any) -> int:
    """Return how many layers of a parsed network are plugins: that of the model's layers, or 0 with the body."""
    return sum(network.get_layer(i).type == trt.LayerType.PLUGIN_V3 for i in range(network.num_layers))


def _register(trt: Any, plugin: Any) -> None:
    types = {trt.float32: "FP32", trt.float16: "FP16", trt.bfloat16: "BF16"}
    descriptors = dict.fromkeys(INPUTS, plugin.TensorDesc)

    def describe(
        past_key: Any, past_value: Any, new_key: Any, new_value: Any, past_length: Any, pending_rows: Any,
        pending_count: Any,
    ) -> Any:  # fmt: skip
        return past_key.aliased(), past_value.aliased()

    def combinations(
        past_key: Any, past_value: Any, new_key: Any, new_value: Any, past_length: Any, pending_rows: Any,
        pending_count: Any, outputs: Any,
    ) -> Any:  # fmt: skip
        # Only the types of the network: another type would be a cast of the whole cache, and not in place.
        dtype = types[past_key.dtype]
        return [plugin.AutoTuneCombination(", ".join([*[dtype] * 4, *["INT64"] * 3, *[dtype] * 2]), "LINEAR")]

    def launch(
        past_key: Any, past_value: Any, new_key: Any, new_value: Any, past_length: Any, pending_rows: Any,
        pending_count: Any, outputs: Any, tactic: Any,
    ) -> Any:  # fmt: skip
        _, heads, cache_rows, head_dim = past_key.shape_expr
        row_bytes = head_dim * past_key.dtype.itemsize
        new_rows, slots = new_key.shape_expr[2], pending_rows.shape_expr[0]
        if pending_rows.shape[0] > kernel.MAX_SLOTS:
            raise ValueError(f"pending_rows has {pending_rows.shape[0]} entries, the kernel takes {kernel.MAX_SLOTS}")
        params = plugin.KernelLaunchParams()  # as kernel.grid and kernel.shared_bytes, in symbols
        params.grid_x, params.grid_y, params.grid_z = plugin.cdiv(row_bytes, kernel.SLICE_BYTES), heads, 2
        params.block_x = kernel.THREADS
        params.shared_mem = slots * kernel.SLICE_BYTES
        scalars = kernel.scalars(cache_rows, new_rows, row_bytes, slots)
        extra = plugin.SymIntExprs.from_tuple([plugin.SymInt32(scalar) for scalar in scalars])
        return kernel.ENTRY, _ptx[trt.__name__], params, extra

    # tensorrt.plugin reads tensors and attributes off the annotations, as objects of its own.
    _annotate(describe, **descriptors, **{"return": GenericAlias(tuple, (plugin.TensorDesc,) * 2)})
    _annotate(combinations)
    _annotate(launch, **{"return": GenericAlias(tuple, (str, str, plugin.KernelLaunchParams, plugin.SymIntExprs))})
    plugin.register(PLUGIN_ID)(describe)
    plugin.autotune(PLUGIN_ID)(combinations)
    plugin.aot_impl(PLUGIN_ID)(launch)


def _annotate(function: Callable[..., Any], **annotations: Any) -> None:
    function.__annotations__ = annotations
