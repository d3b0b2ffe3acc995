"""Formats in chat templates: no field is so wide that it fills the memory."""

from __future__ import annotations

import re
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedEscapeFormatter, SandboxedFormatter

_WIDE_FIELD = re.compile(r"\d{5}|\*")


def check_format(text: str) -> None:
    """Refuse a format with a width that is large, or comes from a value.

    Raises:
        SecurityError: it has one.
    """
    if _WIDE_FIELD.search(text):
        raise SecurityError("the template formats a field that is too wide")


class _FieldLimit:
    """Measures the fields of a format, whose widths may come from values."""

    _env: Any  # the environment

    def format_field(self, value: Any, format_spec: str) -> Any:
        check_format(format_spec.replace("*", ""))  # a fill character
        self._env.step()
        return self._env.held(super().format_field(value, format_spec))  # type: ignore[misc]


class Formatter(_FieldLimit, SandboxedFormatter):
    """Of `str.format`."""


class EscapeFormatter(_FieldLimit, SandboxedEscapeFormatter):
    """Of texts that escape what they are given."""
