"""Sessions that are opened, used and closed leave a process as large as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiny_models import Exported

# In a process without torch, beside which a cache would not be seen. Each answer fills most of its cache.
CYCLES = """
import json, sys
from pathlib import Path
from medusa_engine.runtime.engine import Engine

def resident_bytes():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10

engine = Engine.open(sys.argv[1], threads=1)
prompt = [number % 50 for number in range(engine.limits.max_length - 30)]
sizes = []
for cycle in range(50):
    with engine.session() as session:
        session.generate(prompt_ids=prompt, max_new_tokens=10)
        with session.fork() as fork:
            fork.generate(prompt_ids=[*prompt, 1], max_new_tokens=10)
    sizes.append(resident_bytes())
print(json.dumps({"sizes": sizes, "cache": engine.manifest.cache_bytes}))
"""


def test_fifty_sessions_leave_memory_flat(own_heads: Exported) -> None:
    command = [sys.executable, "-c", CYCLES, str(own_heads.bundle)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    sizes, bar = report["sizes"], 0.05 * report["sizes"][4]
    assert 45 * report["cache"] > bar, "the caches are too small to be missed"
    assert max(sizes[5:]) - sizes[4] <= bar
