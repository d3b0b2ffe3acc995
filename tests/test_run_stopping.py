"""medusa-run --stop and --deadline-ms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_checks import Commands
from tiny_models import Exported

from medusa_engine.runtime.cli import main as medusa_run

ASK = ("--prompt", "hello", "--max-new-tokens", "12", "--ignore-eos")


def test_stop_texts_end_the_answer_before_them(chat_bundle: Path, commands: Commands) -> None:
    whole = json.loads(commands.run("--engine", chat_bundle, *ASK, "--json"))
    stop = whole["text"][3:6]
    expected = whole["text"][: whole["text"].find(stop)]
    options = ("--engine", chat_bundle, *ASK, "--stop", "never there", "--stop", stop)
    answer = json.loads(commands.run(*options, "--json"))
    assert (answer["text"], answer["finish_reason"]) == (expected, "stop")
    assert answer["token_ids"] == whole["token_ids"][: answer["generated_tokens"]]
    assert commands.run(*options) == f"{expected}\n"
    compared = json.loads(commands.run(*options, "--json", "--compare"))
    assert [(way["same_ids"], way["text"]) for way in compared["compared"]] == [(True, expected)] * 3


def test_deadline_ends_the_answer(chat_bundle: Path, commands: Commands) -> None:
    answer = json.loads(commands.run("--engine", chat_bundle, *ASK, "--json", "--deadline-ms", "0.001"))
    assert (answer["token_ids"], answer["finish_reason"]) == ([], "deadline")
    answer = json.loads(commands.run("--engine", chat_bundle, *ASK, "--json", "--deadline-ms", "1e9"))
    assert answer["finish_reason"] == "length"


@pytest.mark.parametrize(("tokens", "per_round"), [("1", "1.00"), ("2", "1.00")])
def test_short_answers_are_compared(
    tokens: str, per_round: str, chat_bundle: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ask = ["--engine", str(chat_bundle), "--prompt", "hello", "--max-new-tokens", tokens, "--compare"]
    assert medusa_run(ask) == 0
    heading, plain, _, adaptive = (line.split() for line in capfd.readouterr().err.splitlines())
    assert heading[0] == "way" and (plain[0], adaptive[0]) == ("plain", "adaptive")
    assert plain[-2:] == [per_round, "yes"] and adaptive[-1] == "yes"


def test_an_answer_without_tokens_is_not_compared(shared_heads: Exported, commands: Commands) -> None:
    ids = ",".join(["1"] * 100)  # rows of the cache
    assert json.loads(commands.run("--engine", shared_heads.bundle, "--prompt-ids", ids, "--json"))["token_ids"] == []
    commands.run_refuses(
        "--engine", shared_heads.bundle, "--prompt-ids", ids, "--compare", named=["the prompt fills the cache"]
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--stop", ""), "stop string"),
        (("--stop", "x" * 5000), "5000 characters"),
        (("--deadline-ms", "0"), "deadline"),
        (("--deadline-ms", "nan"), "deadline"),
        (("--deadline-ms", "5", "--compare"), "--deadline-ms"),
    ],
    ids=["empty", "long", "zero", "nan", "compared"],
)
def test_option_out_of_range(options: tuple[str, ...], named: str, chat_bundle: Path, commands: Commands) -> None:
    commands.run_refuses("--engine", chat_bundle, *ASK, *options, named=[named])
