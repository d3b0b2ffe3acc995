"""The commands of docs/migration.md run, on small stand-ins of the same names."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from checkpoints import CHAT_VOCAB, HIDDEN, save_llama
from documents import ROOT
from safetensors.torch import save_file

from medusa_engine.exporter.cli import main as medusa_export
from medusa_engine.exporter.head_formats import TENSORRT_LLM, VLLM, HeadFormat
from medusa_engine.exporter.heads_cli import main as medusa_heads
from medusa_engine.runtime.cli import main as medusa_run
from medusa_engine.training.tree_cli import main as medusa_tree

HEADS = 5
MAINS: dict[str, Callable[[Sequence[str]], int]] = {
    "medusa-export": medusa_export,
    "medusa-heads": medusa_heads,
    "medusa-run": medusa_run,
    "medusa-tree": medusa_tree,
}


def command_lines() -> list[str]:
    text = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    return [line for block in re.findall(r"^```sh\n(.*?)^```", text, flags=re.M | re.S) for line in block.splitlines()]


def tensors(layout: HeadFormat | None) -> dict[str, torch.Tensor]:
    """Heads of random weights; None for the names of the original repository."""
    residual, projection = ("{h}.{l}.linear", "{h}.{l}.weight")
    if layout is not None:
        residual, projection = layout.residual, layout.projection
    found = {}
    for h in range(HEADS):
        found[residual.format(h=h, l=0) + ".weight"] = torch.randn(HIDDEN, HIDDEN) / 10
        found[residual.format(h=h, l=0) + ".bias"] = torch.zeros(HIDDEN)
        found[projection.format(h=h, l=1)] = torch.randn(CHAT_VOCAB, HIDDEN)
    return found


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """A folder with everything that the page names."""
    torch.manual_seed(0)
    save_llama(tmp_path / "vicuna-7b-v1.3", vocab_size=CHAT_VOCAB, tokenizer="bytelevel_bos_twice")
    for name in ("medusa-vicuna-7b-v1.3", "vllm-medusa", "tllm_checkpoint", "medusa/model", "engines"):
        (tmp_path / name).mkdir(parents=True)
    original = tmp_path / "medusa-vicuna-7b-v1.3"
    torch.save(tensors(None), original / "medusa_lm_head.pt")
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    (original / "config.json").write_text(json.dumps(config))
    save_file(tensors(VLLM), tmp_path / "vllm-medusa" / "model.safetensors")
    backbone = {"transformer.vocab_embedding.weight": torch.zeros(CHAT_VOCAB, HIDDEN)}
    save_file(tensors(TENSORRT_LLM) | backbone, tmp_path / "tllm_checkpoint" / "rank0.safetensors")
    choices = json.loads((ROOT / "trees" / "mc_sim_7b_63.json").read_text())["paths"]
    (tmp_path / "medusa" / "model" / "medusa_choices.py").write_text(f"mc_sim_7b_63 = {choices}\n")
    return tmp_path


@pytest.mark.slow
def test_commands_run(stand_ins: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """But for those of TensorRT, which other tests export and build for."""
    monkeypatch.chdir(stand_ins)
    ran = []
    for line in command_lines():
        words = shlex.split(line)
        if words[0] == "medusa-build" or "tensorrt" in words:
            continue
        if words[0] in MAINS:
            assert MAINS[words[0]](words[1:]) == 0, (line, capfd.readouterr().err)
        else:
            subprocess.run(line.replace("python", sys.executable, 1), shell=True, check=True)
        ran.append(words[0])
    assert set(ran) == {*MAINS, "python", "echo"}
    output = capfd.readouterr()
    for layout in ("original", "vllm", "tensorrt-llm"):
        assert re.search(rf"format +{layout}\n", output.out)
    assert "config.json says medusa_num_heads 2, the file holds 5" in output.out
    assert "choices: 64 nodes" in output.out
