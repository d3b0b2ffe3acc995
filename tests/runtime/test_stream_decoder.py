"""Streamed text: equal to the decoded whole, never half a character, released as soon as it is final."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from medusa_engine.runtime.stop_strings import StopStrings
from medusa_engine.runtime.stream_decoder import CONTEXT_TOKENS, StreamDecoder
from medusa_engine.runtime.text import Tokenizer, read_prompt_file

DATA = Path(__file__).parents[1] / "data"
FOLDERS = DATA / "tokenizers"
EXPECTED: dict[str, Any] = json.loads((FOLDERS / "EXPECTED.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = json.loads((DATA / "streams" / "cases.json").read_text(encoding="utf-8"))
TEXT_CASES = [case for case in CASES if "pieces" in case and "error" not in case]
PROMPTS = [read_prompt_file(path) for path in sorted((DATA / "prompts").glob("*.txt"))]
REPLACEMENT_CHARACTER = "\ufffd"

# What decoders treat apart: spaces, byte tokens, pieces of one character, marks of words and of their ends.
WORDS = (
    "<s> </s> <pad> ▁ ▁▁ ▁a ▁▁b ▁. a bc é 😀 \ufffd n't . | ##a ## </w> a</w> <0x41> <0xF0> <0x9F> <0x98> <0x80> "
    "<0xFF> <0x0> Ġ Ġa Ċ ð Ł ĺ Ģ ðŁ ĺĢ ÿ xð"
)
TOKENS = [*WORDS.split(" "), " ", " .", "\n"]
SPECIAL_TOKENS = ["<s>", "</s>"]
DECODERS: dict[str, decoders.Decoder | None] = {
    "none": None,
    "byte_level": decoders.ByteLevel(),
    "metaspace": decoders.Metaspace(),
    "metaspace_never": decoders.Metaspace(prepend_scheme="never"),
    "byte_fallback": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "byte_fallback_without_strip": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    ),
    "strips_many_spaces": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 20, 0)]),
    "word_piece": decoders.WordPiece(),
    "word_piece_without_cleanup": decoders.WordPiece(cleanup=False),
    "bpe": decoders.BPEDecoder(),
    "replace_behind_fuse": decoders.Sequence([decoders.Fuse(), decoders.Replace("aa", "b")]),
    "word_piece_behind_fuse": decoders.Sequence([decoders.Fuse(), decoders.WordPiece()]),
    "ctc": decoders.CTC(),
}


@cache
def own_tokenizer(name: str) -> tokenizers.Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(TOKENS)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.add_tokens(["▁added", "added é"])
    decoder = DECODERS[name]
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


@cache
def saved_tokenizer(name: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(FOLDERS / name / "tokenizer.json"))


def byte_tokenizer(pieces: Sequence[bytes]) -> tokenizers.Tokenizer:
    """A byte-level tokenizer of the given tokens, all different; an id is the place in `pieces`."""
    # One visible letter stands for each byte: its own where that is visible, or the next one from U+0100 on.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    table = {ord(letter): letter for letter in letters if ord(letter) < 256}
    others = [byte for byte in range(256) if byte not in table]
    table.update(zip(others, letters[len(table) :], strict=True))
    vocabulary = {"".join(table[byte] for byte in piece): index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def streamed(decoder: StreamDecoder, pushes: Sequence[Sequence[int]]) -> list[str]:
    return [*(decoder.push(ids) for ids in pushes), decoder.finish()]


def split(ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    """`ids` cut into pushes of `sizes` ids, the last with all that is left."""
    pushes: list[Sequence[int]] = []
    start = 0
    for size in sizes:
        pushes.append(ids[start : start + size])
        start += size
    return [*pushes, ids[start:]]


PUSH_SIZES = st.lists(st.integers(0, 5), max_size=40)
OWN_IDS = st.lists(st.integers(0, len(TOKENS) + 4), max_size=60)  # the last ids are unknown
# Long runs of the same few tokens: windows filled with spaces, byte runs or invalid bytes alone.
RUNS = st.lists(
    st.tuples(st.lists(st.integers(0, len(TOKENS) + 1), min_size=1, max_size=3), st.integers(1, 20)),
    max_size=4,
).map(lambda runs: [token_id for ids, count in runs for token_id in ids * count])


@pytest.mark.parametrize("case", TEXT_CASES, ids=lambda case: case["id"])
def test_shared_stream_cases(case: dict[str, Any]) -> None:
    pieces = [bytes.fromhex(piece) for piece in case["pieces"]]
    decoder = StreamDecoder(byte_tokenizer(pieces))
    stops = StopStrings(case["stop"])
    sent = [stops.push(decoder.push([token_id])) for token_id in range(len(pieces))]
    rest = stops.push(decoder.finish()) + stops.finish()
    assert "".join(sent) + rest == case["final"] == case.get("sent_joined", case["final"])
    assert ("length" if stops.found is None else "stop") == case["finish"]
    if "sent" in case:
        assert [*sent, rest] == [*case["sent"], ""]


def test_an_invalid_byte_holds_back_nothing_once_it_is_known() -> None:
    decoder = StreamDecoder(byte_tokenizer([b"a", b"\xff", b"b"]))
    assert streamed(decoder, [[0], [1], [2]]) == ["a", "", f"{REPLACEMENT_CHARACTER}b", ""]


def test_a_literal_replacement_character_is_text() -> None:
    tokenizer = Tokenizer.open(FOLDERS / "bytelevel_no_template")
    for text in ("a\ufffd", "\ufffd\ufffd b", "\ufffd"):
        pushes = [[token_id] for token_id in tokenizer.encode(text)]
        assert "".join(streamed(tokenizer.stream_decoder(), pushes)) == text


def test_a_byte_fallback_stream_equals_the_decoded_whole() -> None:
    expected = EXPECTED["spm_byte_fallback"]
    tokenizer = Tokenizer.open(FOLDERS / "spm_byte_fallback")
    pieces = streamed(tokenizer.stream_decoder(), [[token_id] for token_id in expected["ids"]])
    assert "".join(pieces) == expected["full_decode"]
    assert "".join(tokenizer.decode([token_id]) for token_id in expected["ids"]) == expected["naive_token_by_token"]


def test_text_behind_a_prompt_begins_with_its_own_space() -> None:
    expected = EXPECTED["spm_byte_fallback"]["continuation"]
    tokenizer = Tokenizer.open(FOLDERS / "spm_byte_fallback")
    decoder = tokenizer.stream_decoder(prompt_ids=expected["prompt_ids"])
    assert "".join(streamed(decoder, [expected["new_ids"]])) == expected["right_new_text"]
    assert "".join(streamed(tokenizer.stream_decoder(), [expected["new_ids"]])) == "cat"


def test_skipped_tokens_between_words_do_not_lose_a_space() -> None:
    tokenizer = Tokenizer.open(FOLDERS / "spm_byte_fallback")
    the, cat, end = 320, 323, 2
    ids = [the, *[end] * (3 * CONTEXT_TOKENS), cat]
    assert "".join(streamed(tokenizer.stream_decoder(), [[token_id] for token_id in ids])) == "the cat"


def test_special_tokens_are_streamed_when_asked_for() -> None:
    tokenizer = Tokenizer.open(FOLDERS / "bytelevel_bos_twice")
    ids = tokenizer.encode("hello <|eot|>")
    for skip in (True, False):
        text = "".join(streamed(tokenizer.stream_decoder(skip), [ids]))
        assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert "<|eot|>" in text


def test_a_prompt_that_ends_inside_a_character_is_completed() -> None:
    tokenizer = byte_tokenizer([b"x", b"\xf0\x9f", b"\x98\x80", b"y"])
    decoder = StreamDecoder(tokenizer, prompt_ids=[0, 1])
    assert streamed(decoder, [[2], [3]]) == ["😀", "y", ""]


def test_a_prompt_that_stays_inside_a_character_adds_no_second_mark() -> None:
    tokenizer = byte_tokenizer([b"x", b"\xf0", b"\x9f", b"\x98"])
    decoder = StreamDecoder(tokenizer, prompt_ids=[0, 1])
    assert streamed(decoder, [[2], [3]]) == ["", "", ""]


def test_a_prompt_that_ends_in_a_byte_run_is_not_repeated() -> None:
    tokenizer = Tokenizer.open(FOLDERS / "spm_byte_fallback")
    the = 320
    emoji = tokenizer.encode("😀", add_special_tokens=False)[-4:]
    assert tokenizer.decode(emoji) == "😀"
    for new_ids, text in (([the], " the"), ([*emoji, the], "😀 the"), (emoji, "😀")):
        for prompt in ("the 😀", "the " * CONTEXT_TOKENS * 3 + "😀"):
            for pushes in ([new_ids], [[token_id] for token_id in new_ids]):
                decoder = tokenizer.stream_decoder(prompt_ids=tokenizer.encode(prompt))
                assert "".join(streamed(decoder, pushes)) == text


def test_a_prompt_that_ends_in_a_literal_replacement_character_is_not_repeated() -> None:
    tokenizer = Tokenizer.open(FOLDERS / "bytelevel_no_template")
    decoder = tokenizer.stream_decoder(prompt_ids=tokenizer.encode("a\ufffd"))
    assert streamed(decoder, [[], tokenizer.encode("b")]) == ["", "b", ""]


def test_spaces_stripped_from_the_end_stay_in_the_middle() -> None:
    tokenizer = own_tokenizer("byte_level")
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 2)])
    space, letter = TOKENS.index(" "), TOKENS.index("a")
    pushes = [[space], [letter], [space, space], [letter], [space]]
    assert "".join(streamed(StreamDecoder(tokenizer), pushes)) == " a  a"


@pytest.mark.parametrize("name", ["ctc", "replace_behind_fuse", "word_piece_behind_fuse"])
def test_text_that_later_tokens_may_rewrite_is_held_until_the_end(name: str) -> None:
    tokenizer = own_tokenizer(name)
    ids = [TOKENS.index(token) for token in ("a", "a", "bc", "n't", ".")]
    pieces = streamed(StreamDecoder(tokenizer), [[token_id] for token_id in ids])
    assert pieces == ["", "", "", "", "", tokenizer.decode(ids)]


def test_many_spaces_between_words_stay() -> None:
    tokenizer = own_tokenizer("strips_many_spaces")
    letter, space = TOKENS.index("a"), TOKENS.index("▁")
    ids = [space, letter, *[space] * (3 * CONTEXT_TOKENS), letter]
    pieces = streamed(StreamDecoder(tokenizer), [[token_id] for token_id in ids])
    assert "".join(pieces) == tokenizer.decode(ids) == "a" + " " * (3 * CONTEXT_TOKENS) + "a"


def test_push_after_finish_is_refused() -> None:
    decoder = StreamDecoder(byte_tokenizer([b"a"]))
    decoder.finish()
    with pytest.raises(RuntimeError, match="finish"):
        decoder.push([0])


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.data())
def test_joined_pieces_equal_the_decoded_ids(name: str, data: st.DataObject) -> None:
    tokenizer = own_tokenizer(name)
    ids = data.draw(st.one_of(OWN_IDS, RUNS))
    pushes = split(ids, data.draw(PUSH_SIZES))
    for skip in (True, False):
        pieces = streamed(StreamDecoder(tokenizer, skip_special_tokens=skip), pushes)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", DECODERS)
def test_one_long_stream_equals_the_decoded_ids(name: str) -> None:
    tokenizer = own_tokenizer(name)
    generator = random.Random(1)
    for size in (1, 2, 3, 4):
        ids = [generator.randrange(len(TOKENS) + 2) for _ in range(600)]
        pushes = [ids[start : start + size] for start in range(0, len(ids), size)]
        assert "".join(streamed(StreamDecoder(tokenizer), pushes)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["bytelevel_no_template", "spm_byte_fallback"])
@given(data=st.data())
def test_streamed_text_has_no_broken_character(name: str, data: st.DataObject) -> None:
    tokenizer = saved_tokenizer(name)
    alphabet = st.one_of(st.sampled_from(" \n.éह한😀\u200d\u05b8ab"), st.characters(codec="utf-8"))
    text = data.draw(st.one_of(st.text(alphabet, max_size=60), st.sampled_from(PROMPTS)))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = streamed(StreamDecoder(tokenizer), split(ids, data.draw(PUSH_SIZES)))
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "".join(pieces).count(REPLACEMENT_CHARACTER) == text.count(REPLACEMENT_CHARACTER)


@pytest.mark.parametrize("name", ["bytelevel_no_template", "spm_byte_fallback", "byte_fallback", "metaspace", "bpe"])
@given(data=st.data())
def test_all_final_text_is_released_at_once(name: str, data: st.DataObject) -> None:
    tokenizer = own_tokenizer(name) if name in DECODERS else saved_tokenizer(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=50))
    decoder = StreamDecoder(tokenizer)
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    sent = ""
    for count, token_id in enumerate(ids, start=1):
        sent += decoder.push([token_id])
        final = [token_id for token_id in ids[:count] if token_id not in special]
        while "fallback" in name and final and is_byte(tokenizer, final[-1]):
            final.pop()
        text = tokenizer.decode(final)
        assert sent == text.removesuffix(REPLACEMENT_CHARACTER)


def is_byte(tokenizer: tokenizers.Tokenizer, token_id: int) -> bool:
    token = tokenizer.id_to_token(token_id)
    return token is not None and len(token) == 6 and token.startswith("<0x")


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.data())
def test_pieces_behind_a_prompt_are_what_the_ids_add(name: str, data: st.DataObject) -> None:
    tokenizer = own_tokenizer(name)
    prompt_ids, ids = data.draw(OWN_IDS), data.draw(OWN_IDS)
    prompt_text, text = tokenizer.decode(prompt_ids), tokenizer.decode(prompt_ids + ids)
    decoder = StreamDecoder(tokenizer, prompt_ids=prompt_ids)
    new_text = "".join(streamed(decoder, split(ids, data.draw(PUSH_SIZES))))
    if text.startswith(prompt_text):
        assert new_text == text[len(prompt_text) :]
    else:
        assert text.endswith(new_text)


class CountingTokenizer:
    """A tokenizer that keeps the length of the longest list it decoded."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.longest = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        self.longest = max(self.longest, len(ids))
        return self._tokenizer.decode(ids, skip_special_tokens)


STREAM_TEXTS = {
    "words": "the cat sat on hello search it. ",
    "three_token_characters": "한글",
    "emoji": "😀",
    "emoji_and_spaces": "😀 ",
    "spaces": "  ",
    "newlines": "\n",
}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("bytelevel_no_template", text) for text in STREAM_TEXTS),
        *(("spm_byte_fallback", text) for text in ("words", "emoji_and_spaces", "spaces")),
    ],
)
def test_a_long_stream_decodes_only_a_few_tokens_at_a_time(name: str, text: str, size: int) -> None:
    tokenizer = CountingTokenizer(saved_tokenizer(name))
    ids = tokenizer.encode(STREAM_TEXTS[text] * 200, add_special_tokens=False).ids
    decoder = StreamDecoder(cast(tokenizers.Tokenizer, tokenizer))
    for start in range(0, len(ids), size):
        decoder.push(ids[start : start + size])
    assert len(ids) > 100
    assert tokenizer.longest < 4 * CONTEXT_TOKENS
