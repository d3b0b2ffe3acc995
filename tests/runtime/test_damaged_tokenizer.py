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


class PanicException(BaseException):
    """What the library raises where its Rust code panics, by name: no class of that name is importable."""


class Panicking:
    """A backend whose every call panics."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def panic(*_arguments: object, **_options: object) -> Any:
            raise PanicException("range end index 7 out of range")

        return panic


def test_a_panic_of_the_library_is_a_user_error(tmp_path: Path) -> None:
    folder = with_file(tmp_path, (TOKENIZERS / "spm_byte_fallback" / "tokenizer.json").read_text())
    tokenizer = Tokenizer.open(folder)
    tokenizer._backend = Panicking()  # type: ignore[assignment]
    for call in (lambda: tokenizer.encode("a"), lambda: tokenizer.decode([1])):
        with pytest.raises(UserError, match="out of range") as error:
            call()
        assert str(folder / "tokenizer.json") in error.value.problem


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
