"""The examples of docs/method.md give what they say."""

from __future__ import annotations

import doctest

from documents import ROOT

METHOD = ROOT / "docs" / "method.md"


def test_examples_give_what_they_say() -> None:
    result = doctest.testfile(str(METHOD), module_relative=False)
    assert result.attempted > 10 and result.failed == 0
