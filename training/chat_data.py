"""Read a file of given conversations: which rows can be trained on, and why the others cannot.

The file is JSON Lines or one JSON array. A row is one of

    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}     ShareGPT
    {"messages": [{"role": "user", "content": "..."}, ...]}, or that list alone
    {"input_ids": [...], "labels": [...]}       tokenised; label -100: not the assistant's; without labels: all are

and may have other keys, which are not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

import numpy as np

from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.strict_json import parse_json, read_json, shown
from medusa_engine.training.example import Example
from medusa_engine.training.labels import IGNORED

MAX_ARRAY_BYTES = 1 << 30  # of a file that is one array, which is read whole
MAX_LINE_BYTES = 1 << 26

_HINT = "give JSON Lines or one JSON array of ShareGPT, messages or input_ids rows"
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
}

Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content": text}
Row = Sequence[Message] | Example


class Skip(StrEnum):
    """Why a row is not trained on."""

    NO_MESSAGES = "no messages"
    STARTS_WITH_MODEL = "starts with the model"
    NO_ANSWER = "no answer"
    EMPTY_QUESTION = "empty question"
    EMPTY_ANSWER = "empty answer"
    UNKNOWN_ROLE = "unknown role"
    OUT_OF_TURN = "roles out of turn"
    NOTHING_OWNED = "every label is -100"
    NO_TOKENS = "no tokens"
    REFUSED = "refused by the chat template"
    CONTROL_TOKEN = "text of a control token in an answer"
    REWRITTEN = "the chat template or the tokenizer changes an answer's beginning or an earlier turn"
    NO_STOP = "the chat template ends an answer with no stop token of the model"
    BEYOND_LENGTH = "the first answer begins behind the maximum length"


@dataclass
class RowReport:
    """How many rows are used, and how many are skipped for which reason."""

    used: int = 0
    skipped: Counter[Skip] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """For a user to read: the rows used, then each reason with its count, most frequent first."""
        reasons = [f"{count} skipped: {reason}" for reason, count in self.skipped.most_common()]
        return [f"{self.used} of {counted(self.used + self.skipped.total(), 'row')} used", *reasons]


@dataclass
class ChatData:
    """The usable rows of a file, in its order, and what became of all of them."""

    rows: list[Row] = field(default_factory=list)
    report: RowReport = field(default_factory=RowReport)


def read_chat_data(path: Path) -> ChatData:
    """Read a data file; JSON Lines are read line by line.

    A usable row is messages - perhaps a system message, then user and assistant in turn, up to the last answer - or
    an `Example`.

    Raises:
        UserError: the file cannot be read, has no rows, or has a damaged one; names the file and the line, in an
            array the row.
    """
    data = ChatData()
    for where, value in _values(path):
        row = _row(value, where)
        if isinstance(row, Skip):
            data.report.skipped[row] += 1
        else:
            data.rows.append(row)
    data.report.used = len(data.rows)
    if not data.report.used and not data.report.skipped:
        raise UserError(f"{path}: has no rows", _HINT)
    return data


def _values(path: Path) -> Iterator[tuple[str, object]]:
    """Every row as JSON, and where it is."""
    try:
        with path.open("rb") as file:
            array = _is_array(file)
            file.seek(0)
            if not array:
                yield from _lines(file, path)
                return
    except OSError as error:
        raise UserError(f"{path}: cannot read the file: {error.strerror or error}", "check the path") from error
    document = read_json(path, max_bytes=MAX_ARRAY_BYTES, hint="save a large file as JSON Lines: one row per line")
    assert isinstance(document, list)  # it starts as one, and is JSON
    rows = [document] if _starts_with_message(document) else document
    yield from ((f"{path}: row {index}", row) for index, row in enumerate(rows, start=1))


def _is_array(file: BinaryIO) -> bool:
    """Whether the file is one array: it starts as one, and its first line is not a list of messages."""
    line = b""
    while not line.strip(b"\xef\xbb\xbf \t\r\n"):
        line = file.readline(MAX_LINE_BYTES)
        if not line:
            return False
    text = line.decode("utf-8-sig", errors="replace").strip()
    if not text.startswith("["):
        return False
    try:
        return not _starts_with_message(parse_json(text, source="", hint=""))
    except UserError:
        return True  # the array goes on in the next line


def _starts_with_message(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[str, object]]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        where = f"{path}: line {number}"
        if len(line) > MAX_LINE_BYTES:
            raise UserError(f"{where}: longer than {MAX_LINE_BYTES} bytes", "give each conversation a line of its own")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: byte {error.start} is not UTF-8 text", "save the file as UTF-8") from error
        if text.strip():
            yield where, _parse_line(text.rstrip(), where)


def _parse_line(text: str, where: str) -> object:
    try:
        return parse_json(text, source=where, hint=_HINT)
    except UserError as error:  # the parser counts lines within the text
        raise UserError(error.problem.replace(f"{where}: line 1,", f"{where},", 1), error.hint) from error


def _row(value: object, where: str) -> Row | Skip:
    if isinstance(value, list):
        return _conversation(value, where, role_key="role", text_key="content")
    if not isinstance(value, dict):
        raise UserError(f"{where}: {shown(value)} is not a row", _HINT)
    kinds = sorted({"conversations", "messages", "input_ids"} & value.keys())
    if len(kinds) != 1:
        found = f"has {' and '.join(kinds)}" if kinds else "has none of conversations, messages and input_ids"
        raise UserError(f"{where}: the row {found}", "give every row exactly one of them")
    if kinds == ["input_ids"]:
        return _tokenised(value["input_ids"], value.get("labels", value["input_ids"]), where)
    messages = value[kinds[0]]
    if not isinstance(messages, list):
        raise UserError(f"{where}: {kinds[0]} {shown(messages)} is not a list", _HINT)
    keys = ("from", "value") if kinds == ["conversations"] else ("role", "content")
    return _conversation(messages, where, role_key=keys[0], text_key=keys[1])


def _conversation(values: list[object], where: str, *, role_key: str, text_key: str) -> Row | Skip:
    named = [_message(value, f"{where}: message {i}", role_key, text_key) for i, value in enumerate(values, start=1)]
    if not named:
        return Skip.NO_MESSAGES
    if any(role not in _ROLES for role, _ in named):
        return Skip.UNKNOWN_ROLE
    messages = [{"role": _ROLES[role], "content": text} for role, text in named]
    turns = messages[1:] if messages[0]["role"] == "system" else messages
    if turns and turns[0]["role"] == "assistant":
        return Skip.STARTS_WITH_MODEL
    if any(turn["role"] != ("user", "assistant")[place % 2] for place, turn in enumerate(turns)):
        return Skip.OUT_OF_TURN
    answered = len(turns) // 2 * 2  # a last question that nobody answered is left out
    if not answered:
        return Skip.NO_ANSWER
    for turn in turns[:answered]:
        if not turn["content"].strip():
            return Skip.EMPTY_ANSWER if turn["role"] == "assistant" else Skip.EMPTY_QUESTION
    return messages[: len(messages) - len(turns) + answered]


def _message(value: object, where: str, role_key: str, text_key: str) -> tuple[str, str]:
    hint = f'give every message as {{"{role_key}": ..., "{text_key}": ...}}, both texts'
    if not isinstance(value, dict):
        raise UserError(f"{where}: {shown(value)} is not a message", hint)
    for key in (role_key, text_key):
        if not isinstance(value.get(key), str):
            found = f"{key} {shown(value[key])} is not a text" if key in value else f"has no {key}"
            raise UserError(f"{where}: {found}", hint)
    text = value[text_key]
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: character {error.start} of {text_key} is half of a surrogate pair", "correct the text"
        ) from error
    return value[role_key], text


def _tokenised(tokens: object, labels: object, where: str) -> Row | Skip:
    hint = "give token ids from 0, and labels of the same length: the token where it is the assistant's, else -100"
    for name, values in (("input_ids", tokens), ("labels", labels)):
        if not isinstance(values, list) or any(type(value) is not int for value in values):
            raise UserError(f"{where}: {name} is not a list of integers", hint)
    assert isinstance(tokens, list) and isinstance(labels, list)
    if not tokens:
        return Skip.NO_TOKENS
    if wrong := [token for token in tokens if not 0 <= token < 1 << 31]:
        raise UserError(f"{where}: input_ids: {shown(wrong[0])} is not a token id", hint)
    if len(labels) != len(tokens):
        raise UserError(f"{where}: {len(tokens)} input_ids, but {counted(len(labels), 'label')}", hint)
    for place, (token, label) in enumerate(zip(tokens, labels, strict=True)):
        if label not in (token, IGNORED):
            raise UserError(f"{where}: label {shown(label)} at place {place} is neither {token} nor {IGNORED}", hint)
    owned = np.array(labels) != IGNORED
    if not owned.any():
        return Skip.NOTHING_OWNED
    return Example(np.array(tokens, dtype=np.int64), owned)
