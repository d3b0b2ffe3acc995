"""The lookup in the graph's terms equals the numpy reference, and that one worked examples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_engine.exporter.lookup import context_of, look_up
from medusa_engine.runtime.lookup import lookup_tokens

# The context, root last, and the four tokens worked out by hand.
WORKED = {
    "three tokens before two": ([1, 2, 3, 7, 8, 9, 5, 2, 3, 6, 1, 2, 3], [7, 8, 9, 5]),
    "two tokens before one": ([2, 3, 7, 8, 9, 4, 3, 6, 1, 2, 3], [7, 8, 9, 4]),
    "one token, the latest": ([3, 7, 8, 3, 9, 4, 5, 3], [9, 4, 5, 3]),
    "of equal matches the latest": ([1, 2, 3, 7, 0, 1, 2, 3, 8, 6, 5, 4, 1, 2, 3], [8, 6, 5, 4]),
    "it goes on from behind the match": ([9, 1, 2, 1, 2], [1, 2, 1, 2]),
    "one token again and again": ([5, 5, 5, 5], [5, 5, 5, 5]),
    "the key is no occurrence of itself": ([1, 2, 3], [3, 3, 3, 3]),
    "a single token": ([4], [4, 4, 4, 4]),
    "two tokens": ([4, 4], [4, 4, 4, 4]),
    "at the very beginning": ([1, 2, 3, 4, 1, 2, 3], [4, 1, 2, 3]),
    "a key that would begin before the text": ([2, 3, 9, 8, 7, 2, 3], [9, 8, 7, 2]),
}


@pytest.mark.parametrize("case", WORKED)
def test_the_reference_gives_what_was_worked_out_by_hand(case: str) -> None:
    context, expected = WORKED[case]
    assert lookup_tokens(context, 4).tolist() == expected


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_the_graphs_lookup_equals_the_reference(data: st.DataObject) -> None:
    vocabulary = data.draw(st.integers(1, 6))
    tokens = st.lists(st.integers(0, vocabulary - 1), max_size=40)
    history, depth = data.draw(tokens), data.draw(st.integers(1, 5))
    published = data.draw(st.lists(st.integers(0, vocabulary - 1), max_size=depth + 1))
    root = data.draw(st.integers(0, vocabulary - 1))
    expected = lookup_tokens([*history, *published, root], depth)
    count, position = torch.tensor([len(published)]), torch.tensor([len(history)])
    behind = data.draw(st.integers(depth + 2, depth + 9))  # of any content
    stored = torch.cat([torch.tensor(history, dtype=torch.int64), torch.full((behind,), root)])
    padded = torch.tensor([*published, *[-1] * (depth + 1 - len(published))])
    context = context_of(stored, position, padded, count, torch.tensor([root]))
    np.testing.assert_array_equal(look_up(context, position + count, depth).numpy(), expected)
