"""Ids, decoded text, named tokens and file errors of a bundle's tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.text import Tokenizer, read_prompt_file

DATA = Path(__file__).parents[1] / "data"
FOLDERS = DATA / "tokenizers"
# The expected ids and texts were computed with transformers 5.24.
EXPECTED: dict[str, Any] = json.loads((FOLDERS / "EXPECTED.json").read_text(encoding="utf-8"))
NAMES = sorted(folder.name for folder in FOLDERS.iterdir() if folder.is_dir())
BYTE_LEVEL_NAMES = [name for name in NAMES if name.startswith("bytelevel")]
PROMPT_FILES = sorted((DATA / "prompts").glob("*.txt"))
ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=40)


def copy_tokenizer(name: str, folder: Path) -> Path:
    shutil.copytree(FOLDERS / name, folder, dirs_exist_ok=True)
    return folder


def edit_json(path: Path, **changes: object) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    document.update(changes)
    path.write_text(json.dumps(document), encoding="utf-8")


def check_error(error: UserError, *parts: object) -> None:
    for part in parts:
        assert str(part) in error.problem
    assert "\n" not in error.problem
    assert error.hint
    assert "\n" not in error.hint


def test_a_plain_prompt_gets_one_bos_where_the_tokenizer_adds_one() -> None:
    expected = EXPECTED["bytelevel_bos_twice"]
    tokenizer = Tokenizer.open(FOLDERS / "bytelevel_bos_twice")
    assert tokenizer.encode("hello") == expected["plain_prompt_hello_ids"]
    assert tokenizer.encode("hello", add_special_tokens=False) == expected["plain_prompt_hello_ids"][1:]


def test_a_plain_prompt_gets_no_bos_where_the_tokenizer_adds_none() -> None:
    tokenizer = Tokenizer.open(FOLDERS / "bytelevel_no_template")
    assert tokenizer.encode("hello") == EXPECTED["bytelevel_no_template"]["plain_hello_ids"]


def test_an_empty_prompt_is_the_bos_alone_or_nothing() -> None:
    assert Tokenizer.open(FOLDERS / "bytelevel_bos_twice").encode("") == [1]
    assert Tokenizer.open(FOLDERS / "bytelevel_no_template").encode("") == []


def test_decoded_text_keeps_the_spaces_before_punctuation() -> None:
    expected = EXPECTED["bytelevel_cleanup_true"]
    tokenizer = Tokenizer.open(FOLDERS / "bytelevel_cleanup_true")
    assert tokenizer.decode(expected["ids"]) == expected["decode_cleanup_off"]


def test_a_byte_fallback_tokenizer_gives_the_expected_ids_and_text() -> None:
    expected = EXPECTED["spm_byte_fallback"]
    tokenizer = Tokenizer.open(FOLDERS / "spm_byte_fallback")
    assert tokenizer.encode(expected["text"], add_special_tokens=False) == expected["ids"]
    assert tokenizer.decode(expected["ids"]) == expected["full_decode"]


def test_the_text_of_a_special_token_in_a_prompt_becomes_that_token_and_is_reported() -> None:
    expected = EXPECTED["literal_special"]
    tokenizer = Tokenizer.open(FOLDERS / expected["tokenizer"])
    assert tokenizer.encode(expected["text"]) == expected["ids"]
    assert tokenizer.special_tokens_in(expected["text"]) == ["<|eot|>"]
    assert tokenizer.special_tokens_in("</s> then <s>") == ["<s>", "</s>"]
    assert tokenizer.special_tokens_in("eot") == []


def test_added_tokens_that_are_plain_text_are_not_reported_as_special(tmp_path: Path) -> None:
    copy_tokenizer("bytelevel_no_template", tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens(["hello"])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.open(tmp_path).special_tokens_in("hello <s>") == ["<s>"]


def test_special_tokens_are_left_out_of_the_text_unless_asked_for() -> None:
    tokenizer = Tokenizer.open(FOLDERS / "bytelevel_bos_twice")
    ids = [1, 263, 3]
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>hello<|eot|>"


def test_ids_of_a_padded_vocabulary_have_no_text() -> None:
    expected = EXPECTED["padded_vocab"]
    tokenizer = Tokenizer.open(FOLDERS / "bytelevel_no_template")
    assert tokenizer.vocabulary_size == expected["tokenizer_len"]
    padding = range(expected["tokenizer_len"], expected["model_vocab_size"])
    assert tokenizer.decode([263, *padding, 264]) == tokenizer.decode([263, 264])
    assert tokenizer.decode([263, 264]) != ""


def test_vocabulary_size_covers_the_highest_id_when_ids_have_gaps(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.open(tmp_path).vocabulary_size == 10


def test_named_tokens_are_read_from_the_config(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(FOLDERS / "bytelevel_bos_twice")
    assert (tokenizer.bos_token_id, tokenizer.stop_token_ids) == (1, (2,))
    copy_tokenizer("bytelevel_bos_twice", tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", eos_token={"content": "<|eot|>"}, bos_token=None)
    tokenizer = Tokenizer.open(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.stop_token_ids) == (None, (3,))


def test_a_folder_of_tokenizer_json_alone_works_for_plain_prompts(tmp_path: Path) -> None:
    copy_tokenizer("bytelevel_bos_twice", tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.encode("hello") == [1, 263]
    assert (tokenizer.bos_token_id, tokenizer.stop_token_ids) == (None, ())
    assert not tokenizer.has_chat_template


def test_truncation_and_padding_saved_with_the_tokenizer_do_not_touch_a_prompt(tmp_path: Path) -> None:
    copy_tokenizer("bytelevel_no_template", tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "one two three four five"
    ids = backend.encode(text).ids
    for truncated, padded in ((4, None), (None, 64)):
        backend.no_padding()
        backend.no_truncation()
        if truncated is not None:
            backend.enable_truncation(truncated)
        if padded is not None:
            backend.enable_padding(length=padded)
        backend.save(str(tmp_path / "tokenizer.json"))
        assert backend.encode(text).ids != ids
        assert Tokenizer.open(tmp_path).encode(text) == ids


@pytest.mark.parametrize("name", BYTE_LEVEL_NAMES)
@pytest.mark.parametrize("path", PROMPT_FILES, ids=lambda path: path.stem)
def test_a_byte_level_tokenizer_gives_every_prompt_back(name: str, path: Path) -> None:
    tokenizer = Tokenizer.open(FOLDERS / name)
    text = read_prompt_file(path)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@given(ANY_TEXT)
def test_a_byte_level_tokenizer_gives_any_text_back(text: str) -> None:
    tokenizer = Tokenizer.open(FOLDERS / "bytelevel_no_template")
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_text_equal_those_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(FOLDERS / name)
    tokenizer = Tokenizer.open(FOLDERS / name)
    texts = [read_prompt_file(path) for path in PROMPT_FILES]
    for text in [*texts, "hello\ufffd", "<s>twice</s>"]:
        for add_special_tokens in (True, False):
            ids = reference(text, add_special_tokens=add_special_tokens)["input_ids"]
            assert tokenizer.encode(text, add_special_tokens=add_special_tokens) == ids
            for skip in (True, False):
                assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(
                    ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )
    assert tokenizer.vocabulary_size == len(reference)
    assert tokenizer.bos_token_id == reference.bos_token_id
    assert tokenizer.stop_token_ids == (reference.eos_token_id,)


def test_a_lone_surrogate_in_a_prompt_is_a_user_error_with_its_place() -> None:
    tokenizer = Tokenizer.open(FOLDERS / "bytelevel_no_template")
    undecodable = b"ok \xff".decode("utf-8", "surrogateescape")
    with pytest.raises(UserError) as caught:
        tokenizer.encode(undecodable)
    check_error(caught.value, "prompt", "character 3")


def test_a_missing_tokenizer_file_is_a_user_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        Tokenizer.open(tmp_path / "nowhere")
    check_error(caught.value, tmp_path / "nowhere" / "tokenizer.json", "No such file")


@pytest.mark.parametrize("content", [b"", b"{}", b"{", b"\xff\xfe", b'{"model": {"type": "Magic"}}'])
def test_a_broken_tokenizer_file_is_a_user_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        Tokenizer.open(tmp_path)
    check_error(caught.value, path)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"bos_token": 1}', b'{"eos_token": {"content": []}}', b"\xff"])
def test_a_broken_config_is_a_user_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    path = copy_tokenizer("bytelevel_no_template", tmp_path) / "tokenizer_config.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        Tokenizer.open(tmp_path)
    check_error(caught.value, path)


@pytest.mark.parametrize("name", ["bos_token", "eos_token"])
def test_a_named_token_that_the_tokenizer_lacks_is_a_user_error(tmp_path: Path, name: str) -> None:
    path = copy_tokenizer("bytelevel_no_template", tmp_path) / "tokenizer_config.json"
    edit_json(path, **{name: "<|gone|>"})
    with pytest.raises(UserError) as caught:
        Tokenizer.open(tmp_path)
    check_error(caught.value, path, name, "<|gone|>")


def test_a_prompt_file_is_read_byte_for_byte() -> None:
    assert read_prompt_file(DATA / "prompts" / "crlf_tabs.txt") == "a\r\nb\tc\r\n"
    assert read_prompt_file(DATA / "prompts" / "only_spaces.txt") == "    "
    assert read_prompt_file(DATA / "prompts" / "empty.txt") == ""


def test_an_invalid_prompt_file_is_a_user_error_with_the_byte_offset() -> None:
    path = DATA / "prompts" / "invalid_utf8.bin"
    with pytest.raises(UserError) as caught:
        read_prompt_file(path)
    check_error(caught.value, path, "0xf0", "offset 3")


@pytest.mark.parametrize("name", ["missing.txt", "."])
def test_an_unreadable_prompt_file_is_a_user_error_that_names_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError) as caught:
        read_prompt_file(tmp_path / name)
    check_error(caught.value, tmp_path / name)
