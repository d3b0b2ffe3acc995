"""The cache is read and written where it lies: what ONNX Runtime would say of a copy is not heard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import demo_model
import pytest
from tiny_models import Exported

COPIED = "in-place optimization not activated"  # ONNX Runtime's words when past and present are two buffers


def run_with_warnings(code: str, folder: Path) -> str:
    """What ONNX Runtime writes while code runs on `engine`, whose sessions log warnings."""
    prelude = (
        "import sys\n"
        "import numpy as np\n"
        "import onnxruntime as ort\n"
        "from medusa_engine.runtime import onnxruntime_backend\n"
        "from medusa_engine.runtime.engine import Engine\n"
        "assert onnxruntime_backend._LOG_FATAL; onnxruntime_backend._LOG_FATAL = 2\n"
        "ort.set_default_logger_severity(2)\n"
        "engine = Engine.open(sys.argv[1], threads=1)\n"
    )
    command = [sys.executable, "-c", prelude + code, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stderr


THROUGH_THE_RUNTIME = """
for speculation in (True, False):
    generation = engine.generate(
        prompt_ids=list(range(40)), max_new_tokens=6, ignore_eos=True, speculation=speculation
    )
    assert generation.generated_tokens == 6
"""
UNBOUND = """
limits = engine.limits
cache = np.zeros((1, limits.kv_heads, limits.cache_rows, limits.head_dim), dtype=np.float32)
one = np.ones(1, dtype=np.int64)
engine.backend.session("step").run(None, {
    "input_ids": one[None], "position_ids": one[None], "tree_mask": np.ones((1, 1), dtype=bool), "logit_rows": 0 * one,
    "past_length": 0 * one, "pending_rows": np.zeros(limits.depth + 1, dtype=np.int64), "pending_count": 0 * one,
    "stop_ids": one[:0], "token_budget": one, "finished": np.zeros(1, dtype=bool),
} | {f"past_{kind}.{layer}": cache for kind in ("key", "value") for layer in range(limits.layers)})
"""


@pytest.mark.parametrize("bundle", ["own_heads", "shared_heads", "zero_heads"])
def test_the_runtime_never_copies_the_cache(request: pytest.FixtureRequest, bundle: str) -> None:
    exported: Exported = request.getfixturevalue(bundle)
    assert COPIED not in run_with_warnings(THROUGH_THE_RUNTIME, exported.bundle)


@pytest.mark.demo
def test_the_runtime_never_copies_the_cache_of_the_demo() -> None:
    assert COPIED not in run_with_warnings(THROUGH_THE_RUNTIME, demo_model.BUNDLE)


def test_unbound_buffers_are_seen_to_copy_the_cache(own_heads: Exported) -> None:
    # Without this the test above could pass because ONNX Runtime says it in other words.
    assert COPIED in run_with_warnings(UNBOUND, own_heads.bundle)
