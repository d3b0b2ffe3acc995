"""Data files of conversations: every row is used or counted with a reason; a damaged one is named with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from medusa_engine.runtime.errors import UserError
from medusa_engine.training import chat_data
from medusa_engine.training.chat_data import ChatData, Skip, read_chat_data
from medusa_engine.training.example import Example

CASES = Path(__file__).parents[1] / "data" / "training"
QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}


def read_lines(folder: Path, *rows: Any) -> ChatData:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_chat_data(path)


def only_skip(folder: Path, *messages: dict[str, str]) -> Skip:
    data = read_lines(folder, {"messages": list(messages)})
    assert (data.rows, data.report.used) == ([], 0)
    (reason,) = data.report.skipped.elements()
    return reason


def test_odd_sharegpt_rows_are_used_or_counted_with_the_reason() -> None:
    data = read_chat_data(CASES / "sharegpt_odd.json")
    assert data.rows == [
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "2"},
        ]
    ]
    assert data.report.used == 1
    assert data.report.skipped == {
        Skip.STARTS_WITH_MODEL: 1,
        Skip.NO_MESSAGES: 1,
        Skip.NO_ANSWER: 1,
        Skip.EMPTY_ANSWER: 1,
    }
    assert data.report.lines() == [
        "1 of 5 rows used",
        "1 skipped: starts with the model",
        "1 skipped: no messages",
        "1 skipped: no answer",
        "1 skipped: empty answer",
    ]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], Skip.NO_MESSAGES),
        ([SYSTEM], Skip.NO_ANSWER),
        ([SYSTEM, ANSWER, QUESTION], Skip.STARTS_WITH_MODEL),
        ([QUESTION, QUESTION, ANSWER], Skip.OUT_OF_TURN),
        ([QUESTION, ANSWER, SYSTEM, QUESTION, ANSWER], Skip.OUT_OF_TURN),
        ([QUESTION, {"role": "tool", "content": "t"}, ANSWER], Skip.UNKNOWN_ROLE),
        ([QUESTION, ANSWER, QUESTION, {"role": "assistant", "content": " \n"}], Skip.EMPTY_ANSWER),
        ([{"role": "user", "content": ""}, ANSWER], Skip.EMPTY_QUESTION),
    ],
)
def test_each_kind_of_unusable_row_has_its_reason(tmp_path: Path, messages: list[dict[str, str]], reason: Skip) -> None:
    assert only_skip(tmp_path, *messages) is reason


def test_a_last_question_without_answer_is_left_out(tmp_path: Path) -> None:
    assert read_lines(tmp_path, {"messages": [QUESTION, ANSWER, QUESTION]}).rows == [[QUESTION, ANSWER]]


def test_rows_of_every_kind_may_be_mixed_and_have_other_keys(tmp_path: Path) -> None:
    data = read_lines(
        tmp_path,
        [SYSTEM, QUESTION, ANSWER],
        {"id": "x", "conversations": [{"from": "human", "value": "q", "lang": None}, {"from": "gpt", "value": "a"}]},
        {"messages": [QUESTION, ANSWER]},
        {"input_ids": [4, 5]},
    )
    assert data.rows[:3] == [[SYSTEM, QUESTION, ANSWER], [QUESTION, ANSWER], [QUESTION, ANSWER]]
    assert isinstance(data.rows[3], Example)


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_is_the_same_as_lines(tmp_path: Path, indent: int | None) -> None:
    rows: list[Any] = [{"messages": [QUESTION, ANSWER]}, [SYSTEM, QUESTION, ANSWER]]
    path = tmp_path / "rows.json"
    path.write_text("\ufeff\n" + json.dumps(rows, indent=indent), encoding="utf-8")
    assert (
        read_chat_data(path).rows
        == read_lines(tmp_path, *rows).rows
        == [[QUESTION, ANSWER], [SYSTEM, QUESTION, ANSWER]]
    )


@pytest.mark.parametrize("indent", [None, 1])
def test_one_bare_list_of_messages_is_one_row(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "row.json"
    path.write_text(json.dumps([QUESTION, ANSWER], indent=indent))
    assert read_chat_data(path).rows == [[QUESTION, ANSWER]]


def test_labels_say_who_wrote_a_token_and_without_labels_all_are_owned(tmp_path: Path) -> None:
    data = read_lines(tmp_path, {"input_ids": [3, 4, 5], "labels": [-100, 4, -100]}, {"input_ids": [3, 4]})
    labelled, bare = data.rows
    assert isinstance(labelled, Example) and isinstance(bare, Example)
    assert (labelled.tokens.dtype, labelled.owned.dtype) == ("int64", "bool")
    assert (labelled.tokens.tolist(), labelled.owned.tolist()) == ([3, 4, 5], [False, True, False])
    assert (bare.tokens.tolist(), bare.owned.tolist()) == ([3, 4], [True, True])


def test_a_row_of_masked_labels_and_an_empty_one_are_skipped(tmp_path: Path) -> None:
    data = read_chat_data(CASES / "all_masked_row.jsonl")
    assert (data.report.used, data.report.skipped) == (1, {Skip.NOTHING_OWNED: 1})
    assert read_lines(tmp_path, {"input_ids": []}).report.skipped == {Skip.NO_TOKENS: 1}


GOOD = '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}'


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 3, column 2: not valid JSON"),
        (GOOD[:-1], "line 3, column"),
        ('{"input_ids": [NaN]}', "line 3: NaN is not a JSON number"),
        ('{"messages": ' + "[" * 100_000, "line 3: the JSON is nested too deeply"),
        ('{"messages": 1}', "line 3: messages 1 is not a list"),
        ("7", "line 3: 7 is not a row"),
        ('{"text": "x"}', "line 3: the row has none of"),
        ('{"messages": [], "input_ids": [1]}', "line 3: the row has input_ids and messages"),
        ('{"messages": ["x"]}', 'line 3: message 1: "x" is not a message'),
        ('{"messages": [{"role": "user", "value": "q"}]}', "line 3: message 1: has no content"),
        ('{"conversations": [{"from": "human", "value": null}]}', "line 3: message 1: value null is not a text"),
        ('[{"role": "user", "content": ["q"]}]', "line 3: message 1: content a nested list is not a text"),
        (r'{"messages": [{"role": "user", "content": "\ud800"}]}', "line 3: message 1: character 0"),
        ('{"input_ids": "3"}', "line 3: input_ids is not a list of integers"),
        ('{"input_ids": [3, true]}', "line 3: input_ids is not a list of integers"),
        ('{"input_ids": [3, -1]}', "line 3: input_ids: -1 is not a token id"),
        ('{"input_ids": [3, 9223372036854775808]}', "line 3: input_ids: 9223372036854775808 is not a token id"),
        ('{"input_ids": [3, 4], "labels": [4]}', "line 3: 2 input_ids, but 1 label"),
        ('{"input_ids": [3, 4], "labels": null}', "line 3: labels is not a list of integers"),
        ('{"input_ids": [3, 4], "labels": [4, -100]}', "line 3: label 4 at place 0 is neither 3 nor -100"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    with pytest.raises(UserError) as raised:
        read_chat_data(path)
    assert raised.value.problem.startswith(f"{path}: {problem}")
    assert len(raised.value.problem.splitlines()) == 1 and raised.value.hint


def test_a_damaged_row_of_an_array_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(f"[{GOOD},\n3]")
    with pytest.raises(UserError, match=r"rows\.json: row 2: 3 is not a row"):
        read_chat_data(path)


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD.encode() + b"\n\xff\n")
    with pytest.raises(UserError, match="line 2: byte 0 is not UTF-8"):
        read_chat_data(path)


@pytest.mark.parametrize("text", ["", "\n \n", "[]"])
def test_a_file_without_rows_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match="has no rows"):
        read_chat_data(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UserError, match="cannot read the file"):
            read_chat_data(path)


def test_only_an_array_has_to_fit_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_data, "MAX_ARRAY_BYTES", 1000)
    monkeypatch.setattr(chat_data, "MAX_LINE_BYTES", 500)
    path = tmp_path / "rows"
    path.write_text(f"{GOOD}\n" * 50)
    assert read_chat_data(path).report.used == 50
    path.write_text("[" + f"{GOOD},\n" * 50 + f"{GOOD}]")
    with pytest.raises(UserError, match="larger than 1000 bytes"):
        read_chat_data(path)
    path.write_text(GOOD + " " * 500)
    with pytest.raises(UserError, match="line 1: longer than 500 bytes"):
        read_chat_data(path)
