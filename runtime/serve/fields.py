"""The fields of a request, read one by one: of the right kind, or refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import NoReturn

from medusa_engine.runtime.serve.errors import RequestError
from medusa_engine.runtime.strict_json import shown


class Fields:
    """Takes fields out of a JSON object; a field that is null counts as not given.

    Args:
        document: the object.
        within: its place in the request, such as `stream_options.`; put before each name in errors.

    Raises:
        RequestError: from each method, where the field is not what it asks for.
    """

    def __init__(self, document: object, *, within: str = "") -> None:
        if not isinstance(document, dict):
            name = within.rstrip(".")
            raise RequestError(f"{name or 'the request'} is {shown(document)}: give an object", param=name or None)
        self._left: dict[str, object] = {name: value for name, value in document.items() if value is not None}
        self._within = within

    def take(self, name: str) -> object:
        """The value as it is; None if it is not given."""
        return self._left.pop(name, None)

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            self.refuse(name, value, "give a text")
        return value

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, value, "give true or false")
        return bool(value)

    def whole(self, name: str, *, least: int = 0) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if type(value) is not int or value < least:
            self.refuse(name, value, f"give a whole number from {least}")
        return value

    def number(self, name: str) -> float | None:
        value = self.take(name)
        if value is None:
            return None
        if type(value) not in (int, float):
            self.refuse(name, value, "give a number")
        assert isinstance(value, (int, float))
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf  # out of every range

    def nested(self, name: str) -> Fields | None:
        value = self.take(name)
        return None if value is None else Fields(value, within=f"{self._within}{name}.")

    def refuse(self, name: str, value: object, hint: str) -> NoReturn:
        param = f"{self._within}{name}"
        raise RequestError(f"{param} is {shown(value)}: {hint}", param=param)

    def refuse_unsupported(self, neutral: Mapping[str, tuple[object, ...]]) -> None:
        """Refuse these fields, except with values that change nothing."""
        for name, harmless in neutral.items():
            value = self.take(name)
            if value is not None and not any(_same(value, other) for other in harmless):
                param = f"{self._within}{name}"
                others = " or ".join(map(json.dumps, harmless))
                hint = f"leave it out{f', or give {others}' if harmless else ''}"
                raise RequestError(f"{param} is not supported: {hint}", param=param, code="unsupported_parameter")

    def refuse_others(self) -> None:
        """Refuse what was not taken."""
        for name in self._left:
            param = f"{self._within}{name}"
            message = f"unknown field {shown(param)}: leave it out"
            raise RequestError(message, param=param, code="unknown_parameter")


def _same(value: object, other: object) -> bool:
    # 0 and 1 are equal to False and True, but not the same here; 0 and 0.0 are.
    return value == other and isinstance(value, bool) == isinstance(other, bool)
