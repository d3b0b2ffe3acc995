"""Texts are split as a GGUF file says: by the rules of llama.cpp, with which these were compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer, models, pre_tokenizers

from medusa_engine.exporter.gguf_tokenizer import split_as_gguf_says
from medusa_engine.runtime.engine import Engine

TEXT = "Don't\n\n2. x  1234"


def written(path: Path, kind: str | None, model: str = "gpt2") -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if kind is not None:
        writer.add_tokenizer_pre(kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_pairs() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def pieces(tokenizer: Tokenizer) -> list[str]:
    found = tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    return [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in found]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("gpt-2", ["Don", "'t", "\n", "\n", "2", ".", " x", " ", " 1234"]),
        ("smollm", ["Don", "'t", "\n\n", "2", ".", " x", "  ", "1", "2", "3", "4"]),
        ("llama-bpe", ["Don", "'t", "\n\n", "2", ".", " x", " ", " ", "123", "4"]),
        ("qwen2", ["Don", "'t", "\n\n", "2", ".", " x", " ", " ", "1", "2", "3", "4"]),
    ],
)
def test_texts_are_split_as_the_file_says(tmp_path: Path, kind: str, expected: list[str]) -> None:
    tokenizer = byte_pairs()
    assert split_as_gguf_says(tokenizer, written(tmp_path / "a.gguf", kind)) is None
    assert pieces(tokenizer) == expected
    assert tokenizer.model.ignore_merges == (kind == "llama-bpe")


@pytest.mark.parametrize(("kind", "told"), [("of-tomorrow", "as of-tomorrow"), (None, "as no one says")])
def test_what_is_not_known_is_noted_and_left(tmp_path: Path, kind: str | None, told: str) -> None:
    tokenizer = byte_pairs()
    before = pieces(tokenizer)
    note = split_as_gguf_says(tokenizer, written(tmp_path / "a.gguf", kind))
    assert note is not None and told in note
    assert pieces(tokenizer) == before


def test_tokenizers_that_are_no_byte_pairs_are_left(tmp_path: Path) -> None:
    tokenizer = byte_pairs()
    before = pieces(tokenizer)
    assert split_as_gguf_says(tokenizer, written(tmp_path / "a.gguf", "smollm", model="llama")) is None
    assert pieces(tokenizer) == before


@pytest.mark.parametrize(
    ("text", "ids"),
    [("a\n\n2. b", [81, 1116, 34, 30, 278]), ("costs  5 or 1234", [11386, 99, 256, 37, 355, 216, 33, 34, 35, 36])],
)
def test_the_demo_engine_reads_texts_as_llama_cpp_does(demo_engine: Engine, text: str, ids: list[int]) -> None:
    assert demo_engine.encode(text) == ids
