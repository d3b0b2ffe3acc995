"""The demo heads' training prompts are none of those that the heads are scored on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "prompts" / "make_training.py"


def test_prompts_are_different_ones_and_none_of_the_benchmarks() -> None:
    def made(count: int) -> list[str]:
        return subprocess.run(
            [sys.executable, SCRIPT, str(count)], check=True, capture_output=True, text=True
        ).stdout.splitlines()

    prompts = made(4000)
    assert len(set(prompts)) == 4000 and prompts[:50] == made(50)
    assert not [prompt for prompt in prompts if "{" in prompt or prompt != prompt.strip()]
    scored = [
        (ROOT / "benchmarks" / "prompts" / name).read_text().splitlines()
        for name in ("calibration.txt", "calibration_grounded.txt", "held_out.txt")
    ]
    assert all(scored) and not set(prompts) & {prompt for part in scored for prompt in part}
