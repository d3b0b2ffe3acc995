"""docs/troubleshooting.md knows every message of the commands, and no message that is gone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from documents import ROOT
from error_messages import VALUE, Message, messages

PAGE = ROOT / "docs" / "troubleshooting.md"


def listed() -> Iterator[str]:
    """The messages in the first column of the page's tables."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            yield from re.findall(r"`([^`]+)`", line.split(" | ")[0])


@cache
def pattern_of(entry: str) -> re.Pattern[str] | None:
    """None for one of too few words, which stands for a message of just these."""
    words = [re.escape(part) for part in entry.split(VALUE)]
    return re.compile(".*".join(words)) if Message("", entry).telling else None


def covers(entry: str, message: Message) -> bool:
    """Whether an entry is found by who searches for the message."""
    if not message.telling:
        return entry == message.text
    pattern = pattern_of(entry)
    return pattern is not None and pattern.search(message.text) is not None


def spoken() -> list[Message]:
    """The messages that have a word of their own: others hand on what another error or a library says."""
    return [message for message in messages() if re.search("[a-z]", message.text)]


def test_every_message_is_on_the_page() -> None:
    entries = list(listed())
    missing = {f"{m.place}: {m.text}" for m in spoken() if not any(covers(entry, m) for entry in entries)}
    assert sorted(missing) == []


def test_every_entry_of_the_page_is_a_message() -> None:
    known = spoken()
    assert [entry for entry in listed() if not any(covers(entry, message) for message in known)] == []


def test_no_message_is_on_the_page_twice() -> None:
    entries = list(listed())
    assert sorted({entry for entry in entries if entries.count(entry) > 1}) == []
