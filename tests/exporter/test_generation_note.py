"""A checkpoint that asks for sampling or a penalty is exported for greedy answers, and the export says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import save_llama
from transformers import GenerationConfig

from medusa_engine.exporter.cli import main as medusa_export
from medusa_engine.exporter.generation_note import generation_note

ASKS = {
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "repetition_penalty": 1.05,
}


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (
            ASKS,
            "medusa-run --acceptance sample --temperature 0.7 --top-k 20 --top-p 0.8 --repetition-penalty 1.05"
            " on an engine exported with --acceptance sample --repetition-penalty",
        ),
        ({"do_sample": True}, "medusa-run --acceptance sample on an engine exported with --acceptance sample"),
        (
            {"repetition_penalty": 1.1, "temperature": 0.6},  # which concerns sampling alone
            "medusa-run --repetition-penalty 1.1 on an engine exported with --repetition-penalty",
        ),
        ({"do_sample": True, "top_p": 1.0, "min_p": 0.1}, "medusa-run --acceptance sample --min-p 0.1 on"),
    ],
    ids=str,
)
def test_the_note_gives_the_options_that_do_it(settings: dict[str, object], options: str) -> None:
    note = generation_note(GenerationConfig(**settings))
    assert note is not None and options in note and "\n" not in note


@pytest.mark.parametrize("settings", [{}, {"do_sample": False, "temperature": 0.6}, {"repetition_penalty": 1.0}])
def test_there_is_none_for_greedy_settings(settings: dict[str, object]) -> None:
    assert generation_note(GenerationConfig(**settings)) is None


def test_the_export_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_llama(tmp_path / "model")
    settings = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(settings | ASKS))
    (tmp_path / "tree.json").write_text("[[0]]")
    options = ("--model", model, "--tree", tmp_path / "tree.json", "-o", tmp_path / "bundle", "--untrained-heads", "1")
    assert medusa_export(list(map(str, options))) == 0
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("note: "))
    assert str(model) in line and "--temperature 0.7" in line
