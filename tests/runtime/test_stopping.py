"""Stop strings and deadlines, where they end an answer and what they leave in the session."""

from __future__ import annotations

import string
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from tokenizers import decoders, models

from medusa_engine.runtime import rounds
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.generation import Generation
from medusa_engine.runtime.stop_strings import LONGEST_STOP_STRING, MOST_STOP_STRINGS
from medusa_engine.runtime.text import Tokenizer
from medusa_engine.runtime.tree import parse_tree

if TYPE_CHECKING:
    from tiny_models import Exported

TOKENS = 40
# Every path of two ranks down to depth 3: with it the rigged heads publish up to four tokens in a round.
BINARY = parse_tree([[int(rank) for rank in f"{bits:0{n}b}"] for n in (1, 2, 3) for bits in range(2**n)], "binary")


@pytest.fixture(scope="module")
def lettered(rigged_64: Exported) -> Engine:
    """The rigged engine, each of whose 48 tokens is a letter; it writes no letter twice."""
    engine = Engine.open(rigged_64.bundle, threads=1)
    vocabulary = {letter: index for index, letter in enumerate(string.ascii_letters[: engine.limits.vocab_size])}
    letters = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    letters.decoder = decoders.Fuse()
    engine.tokenizer = Tokenizer(letters, bos_token_id=None, stop_token_ids=(), chat_template=None, folder=Path())
    return engine


@pytest.fixture(scope="module")
def whole(lettered: Engine) -> Generation:
    """The answer that nothing ends."""
    generation = lettered.generate(prompt_ids=[0], max_new_tokens=TOKENS, tree=BINARY)
    assert generation.text is not None and len(set(generation.text)) == TOKENS
    assert len(set(generation.published_per_round)) > 2, "stop strings are to end rounds of several lengths"
    return generation


@pytest.mark.parametrize("speculation", [True, False], ids=["rounds", "plain"])
@pytest.mark.parametrize("length", [1, 3])
def test_an_answer_ends_with_its_stop_string_wherever_that_stands_in_a_round(
    lettered: Engine, whole: Generation, speculation: bool, length: int
) -> None:
    text = whole.text or ""
    options: dict[str, Any] = {"speculation": speculation, "tree": BINARY if speculation else None}
    for begin in range(0, TOKENS - length, 3):
        end = begin + length
        with lettered.session() as session:
            stream = session.stream(
                prompt_ids=[0], max_new_tokens=TOKENS, stop=["!", text[begin:end], text[end:]], **options
            )
            pieces = list(stream)
            answer = stream.generation
            assert answer.text == "".join(piece.text for piece in pieces) == text[:begin]
            assert answer.token_ids == [token for piece in pieces for token in piece.token_ids] == whole.token_ids[:end]
            assert answer.finish_reason == "stop"
            assert sum(answer.published_per_round) == end
            # What the round accepted behind the stop string is not in the cache either.
            assert session.token_ids == [0, *answer.token_ids]
            prompt = [*session.token_ids, 7]
            again = session.generate(prompt_ids=prompt, max_new_tokens=6, **options)
            assert again.cached_tokens == 1 + end
            assert again.token_ids == lettered.generate(prompt_ids=prompt, max_new_tokens=6).token_ids


def test_text_is_held_back_only_while_it_may_begin_a_stop_string(lettered: Engine, whole: Generation) -> None:
    text = whole.text or ""
    options: dict[str, Any] = {"prompt_ids": [0], "max_new_tokens": 8, "speculation": False}
    pieces = list(lettered.stream(**options, stop=text[2:4] + "!"))
    assert [piece.text for piece in pieces] == [text[0], text[1], "", "", text[2:5], *text[5:8]]
    pieces = list(lettered.stream(**options, stop=[text[7] + "!"]))
    assert [piece.text for piece in pieces] == [*text[:7], "", text[7]]
    assert [len(piece.token_ids) for piece in pieces] == [1] * 8 + [0]


def test_a_stop_string_wins_over_the_budget_of_the_same_round(lettered: Engine, whole: Generation) -> None:
    text = whole.text or ""
    for budget in range(1, 12):
        for speculation in (True, False):
            answer = lettered.generate(prompt_ids=[0], max_new_tokens=budget, stop=text[5:8], speculation=speculation)
            expected = ("stop", text[:5], 8) if budget >= 8 else ("length", text[:budget], budget)
            assert (answer.finish_reason, answer.text, answer.generated_tokens) == expected


def test_a_stop_string_in_text_that_comes_at_the_end_only_is_found(
    lettered: Engine, whole: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lettered.tokenizer is not None
    tail_stripped = decoders.Sequence([decoders.Fuse(), decoders.Strip("_", 0, 1)])  # may change the last letter
    monkeypatch.setattr(lettered.tokenizer._backend, "decoder", tail_stripped)
    text = whole.text or ""
    answer = lettered.generate(prompt_ids=[0], max_new_tokens=20, stop=text[5:8])
    assert (answer.text, answer.finish_reason) == (text[:5], "stop")


def test_a_stop_string_in_the_prompt_ends_nothing(lettered: Engine, whole: Generation) -> None:
    answer = lettered.generate("abc", max_new_tokens=5, stop="c")
    assert answer.finish_reason == "length" and answer.generated_tokens == 5


@pytest.mark.parametrize(
    "stop", ["", ["x", ""], [7], 7, None, "x" * (LONGEST_STOP_STRING + 1), ["x"] * (MOST_STOP_STRINGS + 1)]
)
def test_a_stop_string_that_is_none_is_refused(lettered: Engine, stop: Any) -> None:
    with lettered.session() as session:
        with pytest.raises(UserError, match="stop string"):
            session.generate(prompt_ids=[0], stop=stop)
        assert session.generate(prompt_ids=[0], max_new_tokens=2).generated_tokens == 2


def test_the_longest_and_the_most_stop_strings_are_accepted(lettered: Engine) -> None:
    stop = ["!" * LONGEST_STOP_STRING] * MOST_STOP_STRINGS
    assert lettered.generate(prompt_ids=[0], max_new_tokens=3, stop=stop).generated_tokens == 3


def test_stop_strings_are_refused_without_a_tokenizer(rigged_64: Exported) -> None:
    with pytest.raises(UserError, match="no tokenizer"):
        rigged_64.engine.generate(prompt_ids=[0], stop="x")


# Deadlines


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The round loop's clock, which stands still unless the test moves `now`."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(rounds, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


@pytest.mark.parametrize("speculation", [True, False], ids=["rounds", "plain"])
def test_a_deadline_ends_an_answer_after_the_round_that_crosses_it(
    rigged_64: Exported, clock: SimpleNamespace, speculation: bool
) -> None:
    with rigged_64.engine.session() as session:
        stream = session.stream(prompt_ids=[0], deadline=2.5, speculation=speculation)
        pieces = []
        for piece in stream:
            pieces.append(piece)
            clock.now += 1.0
        assert len(pieces) == stream.generation.rounds == 3
        assert stream.generation.finish_reason == "deadline"
        prompt = session.token_ids
        assert prompt == [0, *stream.generation.token_ids]
        again = session.generate(prompt_ids=[*prompt, 3], max_new_tokens=9)
    assert again.token_ids == rigged_64.engine.generate(prompt_ids=[*prompt, 3], max_new_tokens=9).token_ids


def test_a_budget_wins_over_a_deadline_of_the_same_round(rigged_64: Exported, clock: SimpleNamespace) -> None:
    stream = rigged_64.engine.stream(prompt_ids=[0], deadline=0.5, max_new_tokens=1)
    next(stream)
    clock.now += 1.0
    assert stream.generation.finish_reason == "length"


def test_a_deadline_that_the_prompt_crosses_ends_it_between_its_passes(own_heads: Exported) -> None:
    engine = own_heads.engine
    prompt = [index % 50 for index in range(rounds.CHUNK_ROWS + 20)]
    with engine.session() as session:
        answer = session.generate(prompt_ids=prompt, deadline=1e-9)
        assert (answer.token_ids, answer.finish_reason) == ([], "deadline")
        assert session.token_ids == prompt[: rounds.CHUNK_ROWS]
        again = session.generate(prompt_ids=prompt, max_new_tokens=9)
        assert again.cached_tokens == rounds.CHUNK_ROWS
    assert again.token_ids == engine.generate(prompt_ids=prompt, max_new_tokens=9).token_ids


@pytest.mark.parametrize("deadline", [0, -1.0, float("nan")])
def test_a_deadline_that_is_no_time_is_refused(rigged_64: Exported, deadline: float) -> None:
    with pytest.raises(UserError, match="deadline is"):
        rigged_64.engine.generate(prompt_ids=[0], deadline=deadline)
