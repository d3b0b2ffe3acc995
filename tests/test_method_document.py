"""The examples of docs/method.md give what they say."""

from __future__ import annotations

import doctest
from pathlib import Path

METHOD = Path(__file__).resolve().parents[1] / "docs" / "method.md"


def test_examples_give_what_they_say() -> None:
    result = doctest.testfile(str(METHOD), module_relative=False)
    assert result.attempted > 10 and result.failed == 0
