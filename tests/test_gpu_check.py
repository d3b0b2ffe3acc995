"""The GPU check: without a GPU it says so; tried at a tiny shape, its rounds are the exporter's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def gpu_check(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_a_dry_run_times_steps_and_rounds_of_the_traced_module(tmp_path: Path) -> None:
    done = gpu_check("--dry-run", "--output", tmp_path / "report.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    rows = report["round, tiny"]["rows"]
    assert [row["nodes"] for row in rows] == [None, 1, 4]
    assert all(row["ms"] > 0 and row["floor_ms"] > 0 for row in rows)
    assert rows[0]["floor_ms"] < rows[1]["floor_ms"] == rows[2]["floor_ms"]  # a plain step reads no heads


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        return
    done = gpu_check("--output", tmp_path / "report.json")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "gpu_check: torch sees no CUDA device here",
        "gpu_check: run it where nvidia-smi lists a GPU, or give --dry-run to try the check",
    ]
    assert not (tmp_path / "report.json").exists()


def test_rounds_fed_back_write_what_plain_steps_write() -> None:
    """Several rounds of the tree, state fed back in place, against plain steps of the same random model."""
    from medusa_engine.benchmarks.gpu import torch_round
    from medusa_engine.benchmarks.gpu_check import tree_of

    model = torch_round.Model(torch_round.SHAPES["tiny"], "cpu", torch.float32, None)
    answers = []
    for plain, nodes in ((True, 1), (False, 16)):
        torch.manual_seed(1)  # the same cache
        loop = torch_round.Loop(model, tree_of(nodes), context=20, rows=128, plain=plain)
        tokens: list[int] = []
        while len(tokens) < 12:
            root = int(loop.inputs["input_ids"][0, 0])
            loop.run()
            tokens += [root] if plain else loop.published[1 : 1 + int(loop.published[0])].tolist()
        answers.append(tokens[:12])
        loop.close()
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 2
