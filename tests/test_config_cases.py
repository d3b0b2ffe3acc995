"""Models whose config fields broke other tools: the ids that tests/data/configs expects, and transformers' beyond them.

Each folder there has a config in the words of published checkpoints, random weights, and the greedy ids of a forward
pass over the whole text for every token, without a cache.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoints import DATA, write_tree
from command_checks import Commands
from tiny_models import export, greedy_ids
from tree_answers import SIZES, check_answers

from medusa_engine.runtime import rounds

CONFIGS = DATA / "configs"
CASES = sorted(folder.name for folder in CONFIGS.iterdir() if (folder / "model.safetensors").is_file())
POSITIONS = 64  # of every case


@pytest.mark.parametrize("name", CASES)
def test_answer_is_the_expected_one_and_goes_on_as_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "CHUNK_ROWS", 7)
    model = Path(shutil.copytree(CONFIGS / name, tmp_path / "model"))
    expected = json.loads((model / "expected.json").read_text())
    exported = export(model, tmp_path / "bundle", *SIZES, "--max-length", str(POSITIONS))
    (case,) = expected["greedy"]
    prompt = expected["prompt_ids"][: case["prompt_len"]]
    reference = greedy_ids(exported.model, prompt, POSITIONS - len(prompt))
    assert reference[: len(case["new_ids"])] == case["new_ids"]
    check_answers(exported, prompt, reference)


def test_heads_that_do_not_divide_the_hidden_size_are_refused_with_transformers_reason(
    tmp_path: Path, commands: Commands
) -> None:
    model = CONFIGS / "llama_hidden_not_divisible"
    tree = write_tree(tmp_path / "tree.json")
    arguments = ("--model", model, "--untrained-heads", "2", "--tree", tree, "-o", tmp_path / "bundle")
    commands.export_refuses(*arguments, named=[model, "28", "3"])
    assert not (tmp_path / "bundle").exists()
