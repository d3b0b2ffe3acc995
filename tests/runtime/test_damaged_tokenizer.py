"""A tokenizer file that its library fails on, panics of it included, is a user error that names the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import TOKENIZERS

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.text import Tokenizer
from medusa_engine.runtime.utf8_file import MAX_BYTES, read_utf8_file


def with_file(folder: Path, text: str) -> Path:
    shutil.copytree(TOKENIZERS / "spm_byte_fallback", folder, dirs_exist_ok=True)
    (folder / "tokenizer.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    "text",
    ["", "not JSON", "[]", "null", "{}", '{"model": NaN}', '{"a": ' * 100_000, '{"version": 1e999}', '{"model": {}}'],
    ids=["empty", "text", "list", "null", "nothing", "nan", "deep", "huge", "no model"],
)
def test_a_file_that_holds_no_tokenizer(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        Tokenizer.open(with_file(tmp_path, text))
    assert str(tmp_path / "tokenizer.json") in error.value.problem


def changed(folder: Path, **fields: Any) -> Tokenizer:
    """The tokenizer with other fields, which the library loads and panics on later."""
    document = json.loads((TOKENIZERS / "spm_byte_fallback" / "tokenizer.json").read_text())
    return Tokenizer.open(with_file(folder, json.dumps(document | fields)))


def refused(folder: Path, call: Callable[[], object]) -> None:
    with pytest.raises(UserError, match="the tokenizer fails") as error:
        call()
    assert str(folder / "tokenizer.json") in error.value.problem


def test_a_panic_while_a_text_is_read(tmp_path: Path) -> None:
    """Its template names a special token that it does not explain."""
    piece = {"SpecialToken": {"id": "X", "type_id": 0}}
    template = {"type": "TemplateProcessing", "single": [piece], "pair": [], "special_tokens": {}}
    tokenizer = changed(tmp_path, post_processor=template)
    refused(tmp_path, lambda: tokenizer.encode("the cat"))


def test_a_panic_while_an_answer_is_decoded(tmp_path: Path) -> None:
    """More spaces are cut from the end than there are characters, all at once or as tokens arrive."""
    blank = {"type": "Replace", "pattern": {"Regex": "."}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 0, "stop": 90}
    tokenizer = changed(tmp_path, decoder={"type": "Sequence", "decoders": [blank, {"type": "Fuse"}, strip]})
    ids = tokenizer.encode("the cat")
    refused(tmp_path, lambda: tokenizer.decode(ids))
    refused(tmp_path, lambda: tokenizer.stream_decoder(prompt_ids=ids))
    stream = tokenizer.stream_decoder()
    assert stream.push(ids) == ""
    refused(tmp_path, stream.finish)


@pytest.mark.parametrize("text", ["[" * 100, json.dumps({"a": {"b": [1e308]}}) * 2, '{"eos_token": 1e400}'])
def test_a_config_that_is_no_json_object(text: str, tmp_path: Path) -> None:
    folder = with_file(tmp_path, (TOKENIZERS / "spm_byte_fallback" / "tokenizer.json").read_text())
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(UserError) as error:
        Tokenizer.open(folder)
    assert str(folder / "tokenizer_config.json") in error.value.problem


def test_a_text_without_end_is_not_read_to_it() -> None:
    with pytest.raises(UserError, match=f"larger than {MAX_BYTES}"):
        read_utf8_file(Path("/dev/zero"), hint="none")
