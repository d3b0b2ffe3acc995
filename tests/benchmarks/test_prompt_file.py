"""The prompts of our own are many, of eight categories, and of no other use; files come in three forms."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from medusa_engine.benchmarks.prompt_file import GROUNDED_PROMPTS, OWN_PROMPTS, UNSORTED, read_prompts
from medusa_engine.runtime.engine import Engine

CATEGORIES = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]


@pytest.fixture(scope="module")
def chat_engine(chat_bundle: Path) -> Engine:
    return Engine.open(chat_bundle, threads=1)


@pytest.fixture(scope="module")
def plain_engine(plain_bundle: Path) -> Engine:
    return Engine.open(plain_bundle, threads=1)


def test_own_prompts_are_at_least_forty_of_eight_categories() -> None:
    prompts = json.loads(OWN_PROMPTS.read_text())
    assert list(prompts) == CATEGORIES
    assert all(len(listed) == 6 for listed in prompts.values())
    every = [prompt for listed in prompts.values() for prompt in listed]
    assert len(set(every)) == len(every) >= 40
    assert all(prompt == prompt.strip() and 20 < len(prompt) < 200 for prompt in every)


def test_grounded_prompts_are_long_and_of_three_tasks() -> None:
    grounded = json.loads(GROUNDED_PROMPTS.read_text())
    assert list(grounded) == ["summarising", "editing", "answering"]
    assert all(len(listed) >= 4 for listed in grounded.values())
    every = [prompt for listed in grounded.values() for prompt in listed]
    assert len(set(every)) == len(every)
    assert all(prompt == prompt.strip() and 800 < len(prompt) < 3600 for prompt in every)


def test_own_prompts_are_of_two_groups_and_those_without_room_are_counted(
    chat_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_engine, "limits", replace(chat_engine.limits, max_length=4000))
    every, left_out = read_prompts(None, chat_engine)
    assert left_out == 0 and len(every) == 60
    assert {prompt.category for prompt in every if prompt.group == "mixed set"} == set(CATEGORIES)
    assert {prompt.category for prompt in every if prompt.group == "grounded tasks"} == {
        "summarising",
        "editing",
        "answering",
    }
    longest = max(len(prompt.ids) for prompt in every)
    monkeypatch.setattr(chat_engine, "limits", replace(chat_engine.limits, max_length=longest + 1))
    fewer, left_out = read_prompts(None, chat_engine)
    assert left_out == 1 and [prompt for prompt in every if len(prompt.ids) < longest] == fewer


def test_own_prompts_were_not_trained_or_calibrated_on() -> None:
    folder = OWN_PROMPTS.parent
    own = {
        prompt
        for file in (OWN_PROMPTS, GROUNDED_PROMPTS)
        for listed in json.loads(file.read_text()).values()
        for prompt in listed
    }
    script = [sys.executable, str(folder / "make_training.py"), "12000"]
    made = subprocess.run(script, check=True, capture_output=True, text=True).stdout.splitlines()
    for others in (
        made,
        *(
            (folder / name).read_text().splitlines()
            for name in ("calibration.txt", "calibration_grounded.txt", "held_out.txt")
        ),
    ):
        assert others and not own & set(others)


def test_texts_become_messages_where_there_is_a_chat_template(
    chat_engine: Engine, plain_engine: Engine, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.json"
    entries = ["Hi.", [{"role": "user", "content": "Hi."}], [1, 2, 3]]
    file.write_text(json.dumps({"a": entries[:2], "b": entries[2:]}))
    (text, messages, ids), _ = read_prompts(file, chat_engine)
    assert text.ids == messages.ids == chat_engine.encode(entries[1])
    assert (ids.ids, ids.category, text.category) == ([1, 2, 3], "b", "a")
    file.write_text(json.dumps(["Hi."]))
    (plain,), _ = read_prompts(file, plain_engine)
    assert (plain.ids, plain.category, plain.name) == (plain_engine.encode("Hi."), UNSORTED, "Hi.")


def test_a_text_file_has_a_prompt_in_every_line(plain_engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"One.\r\n\n  \nTwo  words.\n")
    assert [(prompt.name, prompt.ids) for prompt in read_prompts(file, plain_engine)[0]] == [
        ("One.", plain_engine.encode("One.")),
        ("Two words.", plain_engine.encode("Two  words.")),
    ]
