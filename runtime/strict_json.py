"""Read JSON that a user wrote: bounded, strict, and with errors that say where the mistake is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from medusa_engine.runtime.errors import UserError

_MAX_DEPTH = 64
_READ_BYTES = 1 << 16
_MAX_DIGITS = 600  # below the smallest limit that Python can put on reading one integer (640)
_SHOWN_CHARACTERS = 40


def read_json(path: Path, *, max_bytes: int, hint: str) -> object:
    """Decode a UTF-8 JSON file; a leading byte order mark is skipped.

    NaN, Infinity, numbers that overflow, repeated object keys and deep nesting are refused.

    Args:
        path: the file.
        max_bytes: largest accepted size; little more than that is read.
        hint: what the file should look like, the second line of most errors.

    Raises:
        UserError: the file cannot be read or is not strict JSON; names the file, and line and column
            of a syntax error.
    """
    data = bytearray()
    try:
        with path.open("rb") as file:
            # Not in one call, which would take memory for the largest file first.
            while len(data) <= max_bytes and (block := file.read(_READ_BYTES)):
                data += block
    except OSError as error:
        raise UserError(f"{path}: cannot read the file: {error.strerror or error}", "check the path") from error
    if len(data) > max_bytes:
        raise UserError(f"{path}: the file is larger than {max_bytes} bytes", hint)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8 text", "save the file as UTF-8") from error
    return parse_json(text, source=str(path), hint=hint)


class Unfit:
    """Stands for a number that does not fit, so that whoever knows its place can refuse it by name.

    Args:
        text: as it was written.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text[: _SHOWN_CHARACTERS + 1]


def parse_json(text: str, *, source: str, hint: str, unfit: Callable[[str], object] | None = None) -> object:
    """Decode JSON text with the rules of `read_json`; `source` is named in every error.

    Args:
        text, source, hint: see above.
        unfit: what a number that does not fit, or is none, is read as; None refuses it.

    Raises:
        UserError: the text is not strict JSON.
    """

    def refuse_constant(constant: str) -> object:
        if unfit is not None:
            return unfit(constant)
        raise UserError(f"{source}: {constant} is not a JSON number", hint)

    def read_int(digits: str) -> object:
        if len(digits) > _MAX_DIGITS:
            if unfit is not None:
                return unfit(digits)
            raise UserError(f"{source}: an integer of {len(digits)} digits does not fit", hint)
        return int(digits)

    def read_float(digits: str) -> object:
        value = float(digits)
        if not math.isfinite(value):
            if unfit is not None:
                return unfit(digits)
            raise UserError(f"{source}: number {digits[:_SHOWN_CHARACTERS]} does not fit", hint)
        return value

    def read_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result: dict[str, object] = {}
        for key, value in pairs:
            if key in result:
                raise UserError(f"{source}: key {shown(key)} is given twice", "give every key once")
            result[key] = value
        return result

    try:
        document: object = json.loads(
            text,
            parse_constant=refuse_constant,
            parse_int=read_int,
            parse_float=read_float,
            object_pairs_hook=read_object,
        )
    except json.JSONDecodeError as error:
        raise UserError(
            f"{source}: line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}", hint
        ) from error
    except RecursionError as error:
        raise UserError(f"{source}: the JSON is nested too deeply", hint) from error
    if _deeper_than(_MAX_DEPTH, document):  # writing it again, or looking through it, must not fail either
        raise UserError(f"{source}: the JSON is nested too deeply", hint)
    return document


def _deeper_than(most: int, document: object) -> bool:
    """Whether lists and objects lie inside one another more than `most` times."""
    level = [document]
    for _ in range(most + 1):
        inner: list[object] = []
        for container in level:
            if isinstance(container, dict):
                inner += container.values()
            elif isinstance(container, list):
                inner += container
        level = [value for value in inner if isinstance(value, (dict, list))]
        if not level:
            return False
    return True


def stated(document: Mapping[str, object], name: str) -> str:
    """What an error message says of a field of a JSON object: `is missing`, or `is 3`."""
    return f"is {shown(document[name])}" if name in document else "is missing"


def shown(value: object) -> str:
    """One short line for an error message: `value` as JSON, cut to about 40 characters.

    Lists and objects are named, not printed, and huge integers are given by their size.
    """
    if isinstance(value, (list, tuple)):
        return "a nested list"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"of {value.bit_length()} bits"
    text = json.dumps(value) if value is None or isinstance(value, (bool, str)) else repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
