from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
from compaction_model import one_node_model
from host_kernel import HostKernel

from medusa_engine.plugins.compact_append_kv.reference import compact_append_kv

Floats = npt.NDArray[Any]


def numbers(random: np.random.Generator, rows: int, dtype: str) -> tuple[Floats, Floats]:
    key, value = random.standard_normal((2, 1, 2, rows, 16)).astype(dtype)
    return key, value


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_body_the_reference_and_the_kernel_agree(host_kernel: HostKernel, dtype: str, fixed: bool) -> None:
    random = np.random.default_rng(5)
    cache_rows, slots = 40, 5
    model = one_node_model(numbers(random, cache_rows, dtype)[0], numbers(random, 1, dtype)[0], slots, fixed=fixed)
    options = ort.SessionOptions()
    options.log_severity_level = 4  # past and present are two buffers here
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for seed in range(150):
        past_length, count, new_rows = (int(random.integers(n)) for n in (20, slots + 1, 10))
        new_rows += 1
        past, new = numbers(random, cache_rows, dtype), numbers(random, new_rows, dtype)
        pending_rows = random.integers(0, cache_rows - past_length, slots)
        feed = {
            "past_key": past[0],
            "past_value": past[1],
            "new_key": new[0],
            "new_value": new[1],
            "past_length": np.array([past_length]),
            "pending_rows": pending_rows,
            "pending_count": np.array([count]),
        }
        body = session.run(None, feed)
        kernel, _ = host_kernel(past, new, past_length, pending_rows, count, seed=seed)
        end, slack = past_length + count + new_rows, past_length + slots + new_rows
        for i in range(2):
            reference = compact_append_kv(past[i], new[i], past_length, pending_rows, count)
            np.testing.assert_array_equal(kernel[i], reference)
            np.testing.assert_array_equal(body[i][:, :, :end], reference[:, :, :end])
            np.testing.assert_array_equal(body[i][:, :, slack:], reference[:, :, slack:])


# The parser of TensorRT-RTX is TensorRT's: it looks for the plugin of the node's attributes, then for the body.
# It is asked in a process of its own: a registered plugin stays.

PARSE = textwrap.dedent("""
    import sys
    import numpy as np
    import tensorrt_rtx as trt
    from compaction_model import one_node_model

    class Creator(trt.IPluginCreatorV3Quick):
        def __init__(self, version):
            trt.IPluginCreatorV3Quick.__init__(self)
            self.name, self.plugin_namespace, self.plugin_version = "CompactAppendKV", "medusa", version
            self.field_names = trt.PluginFieldCollection([])

    creators = [Creator(version) for version in sys.argv[1:]]
    for creator in creators:
        assert trt.get_plugin_registry().register_creator(creator, "medusa")
    logger = trt.Logger(trt.Logger.VERBOSE)
    network = trt.Builder(logger).create_network(0)
    past, new = (np.zeros((1, 2, rows, 64), np.float16) for rows in (40, 1))
    model = one_node_model(past, new, 5, fixed=True)
    print("parsed:", trt.OnnxParser(network, logger).parse(model.SerializeToString()))
    print("plugins:", sum(network.get_layer(i).type == trt.LayerType.PLUGIN_V3 for i in range(network.num_layers)))
""")
AS_PLUGIN = "Found registered plugin: CompactAppendKV. Importing this node as a plugin."
AS_FUNCTION = "Found registered local function: CompactAppendKV. Importing as a local function."


def parse_with_creators(*versions: str) -> str:
    command = [sys.executable, "-c", PARSE, *versions]
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return result.stdout + result.stderr


def test_the_parser_picks_the_plugin_that_is_registered() -> None:
    assert AS_PLUGIN in parse_with_creators("1")  # TensorRT-RTX then refuses to make one: it has no quick plugins


@pytest.mark.parametrize("others", [(), ("2",)])
def test_the_parser_imports_the_body_without_the_plugin_of_this_version(others: tuple[str, ...]) -> None:
    log = parse_with_creators(*others)
    assert AS_FUNCTION in log and AS_PLUGIN not in log
    assert "parsed: True" in log and "plugins: 0" in log
