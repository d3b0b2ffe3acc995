"""Where a stop string ends a text, whatever pieces the text arrives in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_engine.runtime import stop_strings
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.stop_strings import StopStrings

# Few letters, so that stop strings overlap the text and each other.
LETTERS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def test_text_that_may_begin_a_stop_string_is_held_and_released() -> None:
    stops = StopStrings(["\nUser:"])
    assert [stops.push(piece) for piece in ("x ", "\nUser", " name")] == ["x ", "", "\nUser name"]
    assert (stops.finish(), stops.found) == ("", None)


def test_held_text_is_released_at_the_end() -> None:
    stops = StopStrings(["END"])
    assert [stops.push("the E"), stops.push("N"), stops.finish(), stops.finish()] == ["the ", "", "EN", ""]


def test_nothing_comes_after_a_stop_string() -> None:
    stops = StopStrings(["!"])
    assert [stops.push("a!b"), stops.push("c"), stops.finish(), stops.found] == ["a", "", "", "!"]


def test_without_stop_strings_everything_passes_at_once() -> None:
    stops = StopStrings([])
    assert [stops.push("a"), stops.push("b"), stops.finish()] == ["a", "b", ""]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UserError, match="empty"):
        StopStrings(["x", ""])


def test_many_long_stop_strings_cost_no_more_per_character_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    longer = stop_strings._Progress._longer

    def counted(progress: stop_strings._Progress, matched: int, character: str) -> int:
        nonlocal steps
        steps += 1
        return longer(progress, matched, character)

    stops = StopStrings([f"{'a' * 1000}{index:024}" for index in range(64)])
    assert stops.push("a" * 1000) == ""
    monkeypatch.setattr(stop_strings._Progress, "_longer", counted)
    assert [stops.push("a"), stops.push("00"), stops.push("b")] == ["a", "", f"{'a' * 1000}00b"]
    assert steps == 64 * 4


def end_by_definition(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that is completed first, read one character at a time."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.lists(LETTERS, max_size=8), STOPS)
def test_the_result_is_that_of_reading_one_character_at_a_time(pieces: list[str], stops: list[str]) -> None:
    stream = StopStrings(stops)
    text = "".join(stream.push(piece) for piece in pieces) + stream.finish()
    assert (text, stream.found) == end_by_definition("".join(pieces), stops)


@given(st.lists(LETTERS, max_size=8), STOPS)
def test_no_more_is_held_than_the_beginning_of_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    stream = StopStrings(stops)
    sent = pushed = ""
    for piece in pieces:
        sent += stream.push(piece)
        pushed += piece
        if stream.found is not None:
            return
        held = pushed.removeprefix(sent)
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
