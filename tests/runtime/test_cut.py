"""The numpy reference of where an answer ends inside a pass, against worked cases and plain counting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_engine.runtime.stopping import Cut, cut

STOP, OTHER = 7, 9
WORKED: dict[str, tuple[list[int], int, Cut]] = {
    # name: accepted tokens, budget, what comes of it with the stop tokens 7 and 9
    "nothing ends it": ([1, 2, 3], 4, Cut(3, 1, False)),
    "the budget is used up exactly": ([1, 2, 3], 3, Cut(3, 0, True)),
    "the budget ends inside": ([1, 2, 3], 2, Cut(2, 0, True)),
    "one token is left": ([1, 2, 3], 1, Cut(1, 0, True)),
    "none is left": ([1, 2, 3], 0, Cut(0, 0, True)),
    "the root is a stop token": ([STOP, 2, 3], 9, Cut(1, 8, True)),
    "a stop token inside": ([1, STOP, 3], 9, Cut(2, 7, True)),
    "a stop token is the last": ([1, 2, STOP], 9, Cut(3, 6, True)),
    "the first of two stop tokens": ([1, OTHER, STOP], 9, Cut(2, 7, True)),
    "a stop token at the budget": ([1, STOP, 3], 2, Cut(2, 0, True)),
    "a stop token behind the budget": ([1, 2, STOP], 2, Cut(2, 0, True)),
}


@pytest.mark.parametrize("name", WORKED)
def test_worked_cases(name: str) -> None:
    accepted, budget, expected = WORKED[name]
    assert cut(accepted, stop_ids=[STOP, OTHER], token_budget=budget, finished=False) == expected
    assert cut(accepted, stop_ids=[STOP, -1, OTHER], token_budget=budget, finished=True) == Cut(0, budget, True)


@given(
    accepted=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    stop_ids=st.lists(st.integers(-1, 4), max_size=3),
    budget=st.integers(0, 8),
)
def test_tokens_are_published_one_by_one_until_one_ends_the_answer(
    accepted: list[int], stop_ids: list[int], budget: int
) -> None:
    published, left, ended = [], budget, budget == 0
    for token in accepted:
        if ended:
            break
        published.append(token)
        left -= 1
        ended = token in stop_ids or left == 0
    result = cut(accepted, stop_ids=stop_ids, token_budget=budget, finished=False)
    assert (accepted[: result.published], result.token_budget, result.finished) == (published, left, ended)
