"""What lookup gets right is counted by key length and depth, as worked out by hand."""

from __future__ import annotations

import numpy as np

from medusa_engine.runtime.lookup import lookup_tokens
from medusa_engine.training.lookup_hits import look_ups, lookup_counts, lookup_lines

# Prompt 1 2 3 4 5, answer 2 3 4 5 2 9 3 4, of which the last token is a label alone.
#   behind 2: key "2", then 3 4 5 2 (round and round): 3 4 5 2 are right, 3 is not 9
#   behind 3: key "2 3", then 4 5 2 3: 4 5 2 are right
#   behind 4: key "2 3 4", then 5 2 3: 5 2 are right; behind 5: key "3 4 5", then 2, right, and 3, wrong
#   behind 2: key "4 5 2"?  no: "5 2" stands behind the prompt; then 3, wrong
#   behind 9: nothing, 9 again: wrong; behind 3: key "3", latest of two, then 4: right
PROMPT, ANSWER, COUNT = [1, 2, 3, 4, 5], [2, 3, 4, 5, 2, 9, 3, 4], 7


def test_answer_worked_out_by_hand() -> None:
    found = look_ups(PROMPT, ANSWER, COUNT)
    assert found.keys.tolist() == [1, 2, 3, 3, 3, 0, 1]
    assert found.runs.tolist() == [4, 3, 2, 1, 0, 0, 1]
    assert found.ahead.tolist() == [7, 6, 5, 4, 3, 2, 1]


def test_counts_are_conditional_on_the_depth_before() -> None:
    counts = lookup_counts([look_ups(PROMPT, ANSWER, COUNT)])
    # By key length 0, 1, 2, 3. The run of the last token is cut by the end of the record: it counts at depth 1 alone.
    assert counts.positions == [[1, 2, 1, 3], [0, 1, 1, 2], [0, 1, 1, 1], [0, 1, 1, 0]]
    assert counts.hits == [[0, 2, 1, 2], [0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 0, 0]]


def test_runs_are_those_of_the_reference() -> None:
    random = np.random.default_rng(3)
    prompt, answer = random.integers(0, 4, 30).tolist(), random.integers(0, 4, 60).tolist()
    found = look_ups(prompt, answer, 50)
    for token, run in enumerate(found.runs.tolist()):
        looked_up = lookup_tokens([*prompt, *answer[: token + 1]], run + 1).tolist()
        assert looked_up[:run] == answer[token + 1 : token + 1 + run]
        assert looked_up[run:] != answer[token + 1 + run : token + 2 + run]
    assert found.runs.max() > 1


def test_people_are_told_how_often_each_key_is_found_and_right() -> None:
    lines = lookup_lines(lookup_counts([look_ups(PROMPT, ANSWER, COUNT)]))
    assert lines == [
        "lookup, key of 3: found at 43% of the tokens, right: 67%, 50%, 0%",
        "lookup, key of 2: found at 14% of the tokens, right: 100%, 100%, 100%, 0%",
        "lookup, key of 1: found at 29% of the tokens, right: 100%, 100%, 100%, 100%",
    ]
    assert lookup_lines(lookup_counts([look_ups([1], [2, 3, 4], 3)])) == ["lookup: never right"]
