"""A plan built on this machine from a bundle for TensorRT, through the runtime: exactness and times."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.manifest import TENSORRT, read_manifest

MODULES = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt-rtx"}  # module -> flavor
PROMPT = "Describe in a few sentences how a sailing boat can move against the wind."
TOKENS = 200


def check() -> dict[str, Any]:
    """Build with its self-test, then the same answers with and without speculation, twice each."""
    flavor = next((flavor for module, flavor in MODULES.items() if importlib.util.find_spec(module)), None)
    if flavor is None:
        return {"not run": "neither tensorrt nor tensorrt_rtx is installed"}
    bundle = _bundle()
    if bundle is None:
        return {"not run": "engines/ has no bundle of target tensorrt: medusa-export --target tensorrt"}
    from medusa_engine.exporter.build_cli import main as medusa_build

    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "check.plan"
        status = medusa_build([str(bundle), "--output", str(plan), "--flavor", flavor])
        if status:
            return {"failed": f"medusa-build ended with status {status}", "bundle": str(bundle)}
        engine = Engine.open(plan)
        found: dict[str, Any] = {"bundle": bundle.name, "flavor": flavor, "self_test": "passed", "answers": []}
        for _ in range(2):
            plain, speculative = (
                engine.generate(
                    PROMPT,
                    max_new_tokens=TOKENS,
                    speculation=speculation,
                    adaptive=False,
                )
                for speculation in (False, True)
            )
            found["answers"].append(
                {
                    "same_ids": plain.token_ids == speculative.token_ids,
                    "plain_step_ms": median(plain.round_seconds) * 1e3,
                    "round_ms": median(speculative.round_seconds) * 1e3,
                    "published_per_round": speculative.generated_tokens / max(1, speculative.rounds),
                    "speed_up": plain.timings.decode / speculative.timings.decode,
                }
            )
    return found


def _bundle() -> Path | None:
    engines = Path(__file__).parents[2] / "engines"
    for manifest in sorted(engines.glob("*/manifest.json")):
        if read_manifest(manifest.parent).target == TENSORRT:
            return manifest.parent
    return None
