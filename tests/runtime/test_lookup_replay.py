"""What is known of lookups while an answer is written is what the reference says of the finished context."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from medusa_engine.runtime.lookup import latest_match, lookup_tokens
from medusa_engine.runtime.lookup_replay import LookupReplay

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def hits_of(context: list[int], rest: list[int], depth: int) -> int | None:
    """By the reference; None where the rest ends first."""
    for step, token in enumerate(lookup_tokens(context, depth).tolist()):
        if step == len(rest):
            return None
        if rest[step] != token:
            return step
    return depth


@given(prompt=TOKENS, answer=TOKENS, depth=st.integers(1, 6))
def test_hits_are_those_of_the_reference_as_soon_as_they_can_be_told(
    prompt: list[int], answer: list[int], depth: int
) -> None:
    replay = LookupReplay(prompt, depth)
    for count, token in enumerate(answer, 1):
        replay.append(token)
        assert replay.tokens == [*prompt, *answer[:count]]
        for root in range(len(prompt), len(replay.tokens)):
            assert replay.hits(root) == hits_of(replay.tokens[: root + 1], replay.tokens[root + 1 :], depth)


@given(prompt=TOKENS, answer=TOKENS)
def test_a_match_is_the_key_and_the_tokens_that_were_looked_up_right_before(
    prompt: list[int], answer: list[int]
) -> None:
    replay = LookupReplay(prompt, 3)
    assert replay.match == (latest_match(prompt)[0], 0)  # a prompt copies as it likes
    streak = 0
    for count, token in enumerate(answer):
        found = lookup_tokens([*prompt, *answer[:count]], 1)[0]
        streak = streak + 1 if found == token else 0
        expected = (latest_match([*prompt, *answer[: count + 1]])[0], streak)
        assert replay.match_behind(token) == expected
        assert len(replay.tokens) == len(prompt) + count  # it is not taken yet
        replay.append(token)
        assert replay.match == expected


def test_without_a_chain_there_are_no_hits() -> None:
    assert LookupReplay([1, 2, 3], 0).hits(2) == 0
